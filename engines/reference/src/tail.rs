//! What a prefill engine gives its decode engine besides the rows: the first token. The node moves
//! it as bytes and does not look into it.

#![forbid(unsafe_code)]

use kvasir_proto::v1;
use prost::Message;

/// The hand-over of one request.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct EngineTail {
    /// The first token of the answer with its log probabilities, if they were asked for.
    #[prost(message, optional, tag = "1")]
    pub first_token: Option<v1::TokenOut>,
}

impl EngineTail {
    pub(crate) fn to_bytes(first_token: v1::TokenOut) -> Vec<u8> {
        EngineTail { first_token: Some(first_token) }.encode_to_vec()
    }

    /// The first token; `None` when the bytes are no tail, or name a token that does not exist.
    pub(crate) fn first_token(bytes: &[u8], vocab: u32) -> Option<v1::TokenOut> {
        let first = EngineTail::decode(bytes).ok()?.first_token?;
        (first.id < vocab).then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_comes_back_as_it_was_and_bytes_that_are_none_are_refused() {
        let first = v1::TokenOut { id: 7, logprob: None, top: Vec::new() };
        let bytes = EngineTail::to_bytes(first.clone());
        assert_eq!(EngineTail::first_token(&bytes, 8), Some(first));
        assert_eq!(EngineTail::first_token(&bytes, 7), None);
        assert_eq!(EngineTail::first_token(&[], 8), None);
        assert_eq!(EngineTail::first_token(&[0xFF], 8), None);
    }
}
