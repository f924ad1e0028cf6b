//! The name of a context: where its chain begins and where it ends, so that nothing has to be
//! remembered to find it. It is no secret: nodes look for it among the contexts of the tenant who asks.

use std::fmt;

use kvasir_proto::{BlockKey, Namespace};

const PREFIX: &str = "ctx_";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ContextId {
    pub namespace: Namespace,
    pub last_key: BlockKey,
}

impl ContextId {
    /// `None` for what no context is called.
    pub(super) fn parse(text: &str) -> Option<ContextId> {
        let (namespace, last_key) = text.strip_prefix(PREFIX)?.split_at_checked(32)?;
        let id = ContextId {
            namespace: Namespace(bytes_of(namespace)?),
            last_key: BlockKey(bytes_of(last_key)?),
        };
        Some(id)
    }

    /// As nodes are told after which one of their lists a page comes.
    pub(super) fn to_bytes(self) -> Vec<u8> {
        [self.namespace.0, self.last_key.0].concat()
    }

    /// The same for a page that begins with this one; empty for the beginning of a list.
    pub(super) fn just_before(self) -> Vec<u8> {
        let mut bytes = self.to_bytes();
        for byte in bytes.iter_mut().rev() {
            let borrows;
            (*byte, borrows) = byte.overflowing_sub(1);
            if !borrows {
                return bytes;
            }
        }
        Vec::new()
    }
}

/// Of 32 digits in small letters: there is one way to write each.
fn bytes_of(digits: &str) -> Option<[u8; 16]> {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (digits.len() == 32 && digits.bytes().all(is_digit))
        .then(|| u128::from_str_radix(digits, 16).ok())
        .flatten()
        .map(u128::to_be_bytes)
}

impl fmt::Display for ContextId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (namespace, last_key) = (self.namespace.0, self.last_key.0);
        let number = u128::from_be_bytes;
        write!(f, "{PREFIX}{:032x}{:032x}", number(namespace), number(last_key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn just_before_an_id_comes_what_is_one_less() {
        let id =
            |namespace, key| ContextId { namespace: Namespace(namespace), last_key: BlockKey(key) };
        let (zero, mut one) = ([0; 16], [0; 16]);
        one[15] = 1;
        assert_eq!(id(one, one).just_before(), id(one, zero).to_bytes());
        assert_eq!(id(one, zero).just_before(), id(zero, [0xff; 16]).to_bytes());
        assert_eq!(id(zero, zero).just_before(), Vec::<u8>::new());
    }

    #[test]
    fn an_id_is_read_as_it_is_written_and_in_no_other_way() {
        let mut key = [0xab; 16];
        key[0] = 0;
        let id = ContextId { namespace: Namespace([0x01; 16]), last_key: BlockKey(key) };
        let text = id.to_string();
        assert_eq!(text, format!("ctx_{}00{}", "01".repeat(16), "ab".repeat(15)));
        assert_eq!(ContextId::parse(&text), Some(id));
        for wrong in [
            String::new(),
            "ctx_".to_owned(),
            text[1..].to_owned(),
            text[..67].to_owned(),
            format!("{text}0"),
            text.to_uppercase(),
            text.replace("ab", "AB"),
            text.replace("ctx_01", "ctx_+1"),
            text.replace("ctx_0101", "ctx_ä1"),
        ] {
            assert_eq!(ContextId::parse(&wrong), None, "{wrong:?}");
        }
    }
}
