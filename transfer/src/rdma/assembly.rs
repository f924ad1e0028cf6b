//! Messages are put together here from the pieces that a card has placed. Where cards keep order the pieces
//! of one message follow each other; otherwise they come in any order, and mix with those of others.
//!
//! What peers claim bounds nothing by itself: neither how much is kept of messages that are not whole, nor
//! how many pieces one may have.

use std::collections::BTreeMap;

use super::wire::PieceHeader;
use crate::messages::MESSAGE_BYTES_MAX;
use crate::worker::link::LinkEnd;

/// Messages that are not whole, where there is no order. A writer has fewer pieces under way.
const PARTIALS_MAX: usize = 1024;
/// What is kept of them besides four of the longest that are taken.
const PARTIAL_BYTES: usize = 4 << 20;
/// Of every piece but a message's last, where there is no order: what pieces a message may have is remembered.
const PIECE_BYTES_MIN: usize = 1024;

#[derive(Debug)]
pub(super) struct Assembly {
    /// Of the next message that is whole.
    buffer: Vec<u8>,
    partials: Partials,
}

#[derive(Debug)]
enum Partials {
    /// The message whose pieces are coming.
    Ordered(Option<Following>),
    Unordered(Mixed),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Following {
    id: u64,
    come_bytes: u32,
}

/// By their ids.
#[derive(Debug, Default)]
struct Mixed {
    partials: BTreeMap<u64, Partial>,
    context_bytes: usize,
}

#[derive(Debug)]
struct Partial {
    bytes: u32,
    /// The ends of the pieces that have come, by their beginnings.
    come: BTreeMap<u32, u32>,
    come_bytes: u32,
    /// Empty for one that is too long.
    message: Vec<u8>,
}

/// What a piece has led to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Put {
    More,
    /// The message is in the buffer.
    Whole {
        id: u64,
    },
    /// It has come whole, and is longer than any that is taken.
    TooLong {
        id: u64,
    },
}

impl Assembly {
    pub(super) fn new(is_ordered: bool) -> Self {
        let partials = if is_ordered {
            Partials::Ordered(None)
        } else {
            Partials::Unordered(Mixed::default())
        };
        Assembly { buffer: Vec::new(), partials }
    }

    /// The message that is whole; to be emptied before the next piece.
    pub(super) fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// Takes a piece, or lets it go by where its message is too long.
    pub(super) fn put(&mut self, bytes: &[u8], message_bytes_max: usize) -> Result<Put, LinkEnd> {
        let (header, piece) = PieceHeader::decode(bytes).ok_or(LinkEnd::Malformed)?;
        // An empty piece of a message that has more would never end it.
        let is_endless = piece.is_empty() && header.bytes > 0;
        if header.bytes as usize > MESSAGE_BYTES_MAX || is_endless {
            return Err(LinkEnd::Malformed);
        }
        let Assembly { buffer, partials } = self;
        match partials {
            Partials::Ordered(partial) => {
                follow(partial, header, piece, (buffer, message_bytes_max))
            }
            Partials::Unordered(mixed) => mixed.put(header, piece, (buffer, message_bytes_max)),
        }
    }
}

/// The pieces of one message follow each other.
fn follow(
    partial: &mut Option<Following>,
    header: PieceHeader,
    piece: &[u8],
    (buffer, message_bytes_max): (&mut Vec<u8>, usize),
) -> Result<Put, LinkEnd> {
    let PieceHeader { id, bytes, offset } = header;
    let come_bytes = match partial.take() {
        None if offset == 0 => 0,
        Some(partial) if partial.id == id && offset > 0 => partial.come_bytes,
        _ => return Err(LinkEnd::Malformed),
    };
    if come_bytes != offset {
        return Err(LinkEnd::Malformed);
    }
    let is_too_long = bytes as usize > message_bytes_max;
    if !is_too_long {
        buffer.extend_from_slice(piece);
    }
    let come_bytes = come_bytes + piece.len() as u32;
    if come_bytes < bytes {
        *partial = Some(Following { id, come_bytes });
        return Ok(Put::More);
    }
    Ok(if is_too_long { Put::TooLong { id } } else { Put::Whole { id } })
}

impl Mixed {
    fn put(
        &mut self,
        header: PieceHeader,
        piece: &[u8],
        (buffer, message_bytes_max): (&mut Vec<u8>, usize),
    ) -> Result<Put, LinkEnd> {
        let PieceHeader { id, bytes, offset } = header;
        // `PieceHeader` has seen that the piece lies in its message.
        let end = offset + piece.len() as u32;
        if piece.len() < PIECE_BYTES_MIN && end < bytes {
            return Err(LinkEnd::Malformed);
        }
        let is_too_long = bytes as usize > message_bytes_max;
        let kept_max = PARTIAL_BYTES + 4 * message_bytes_max;
        let partial = match self.partials.get_mut(&id) {
            Some(partial) if partial.bytes == bytes => partial,
            Some(_) => return Err(LinkEnd::Malformed),
            None => {
                let context_bytes = if is_too_long { 0 } else { bytes as usize };
                self.context_bytes += context_bytes;
                if self.partials.len() >= PARTIALS_MAX || self.context_bytes > kept_max {
                    return Err(LinkEnd::Malformed);
                }
                let message = vec![0; context_bytes];
                let partial = Partial { bytes, come: BTreeMap::new(), come_bytes: 0, message };
                self.partials.entry(id).or_insert(partial)
            }
        };
        partial.take(offset, end, piece)?;
        if partial.come_bytes < bytes {
            return Ok(Put::More);
        }
        if let Some(whole) = self.partials.remove(&id) {
            self.context_bytes -= whole.message.len();
            *buffer = whole.message;
        }
        Ok(if is_too_long { Put::TooLong { id } } else { Put::Whole { id } })
    }
}

impl Partial {
    fn take(&mut self, offset: u32, end: u32, piece: &[u8]) -> Result<(), LinkEnd> {
        let before = self.come.range(..=offset).next_back();
        let after = self.come.range(offset..).next();
        let is_taken = before.is_some_and(|(_, before_end)| *before_end > offset)
            || after.is_some_and(|(begin, _)| *begin < end)
            || self.come.contains_key(&offset);
        if is_taken {
            return Err(LinkEnd::Malformed);
        }
        self.come.insert(offset, end);
        self.come_bytes += piece.len() as u32;
        if let Some(room) = self.message.get_mut(offset as usize..end as usize) {
            room.copy_from_slice(piece);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(id: u64, bytes: u32, offset: u32, body: &[u8]) -> Vec<u8> {
        [PieceHeader { id, bytes, offset }.encode().as_slice(), body].concat()
    }

    #[test]
    fn a_message_is_put_together_from_its_pieces() {
        let mut assembly = Assembly::new(true);
        let mut put = |bytes: &[u8]| assembly.put(bytes, 8).expect("in order");
        assert_eq!(put(&piece(1, 5, 0, b"abc")), Put::More);
        assert_eq!(put(&piece(1, 5, 3, b"de")), Put::Whole { id: 1 });
        assert_eq!(assembly.buffer(), b"abcde");
        assembly.buffer().clear();
        let mut put = |bytes: &[u8]| assembly.put(bytes, 8).expect("in order");
        assert_eq!(put(&piece(2, 9, 0, b"too")), Put::More);
        assert_eq!(put(&piece(2, 9, 3, b" long!")), Put::TooLong { id: 2 });
        assert_eq!(put(&piece(3, 0, 0, b"")), Put::Whole { id: 3 });
        assert!(assembly.buffer().is_empty(), "a message that is too long is not kept");
    }

    fn check_malformed(is_ordered: bool, cases: &[&[Vec<u8>]]) {
        for pieces in cases {
            let mut assembly = Assembly::new(is_ordered);
            let last = pieces.iter().map(|bytes| assembly.put(bytes, 8 << 10)).last();
            assert_eq!(last, Some(Err(LinkEnd::Malformed)), "{is_ordered}");
        }
    }

    #[test]
    fn pieces_that_do_not_follow_each_other_are_malformed() {
        let huge = MESSAGE_BYTES_MAX as u32 + 1;
        check_malformed(
            true,
            &[
                &[piece(1, huge, 0, b"abc")],
                &[piece(1, 5, 3, b"de")],
                &[piece(1, 5, 0, b"abc"), piece(1, 5, 0, b"abc")],
                &[piece(1, 5, 0, b"abc"), piece(2, 5, 3, b"de")],
                &[piece(1, 5, 0, b"abc"), piece(1, 5, 4, b"e")],
                &[piece(1, 5, 0, b"")],
            ],
        );
    }

    #[test]
    fn without_order_pieces_come_in_any_and_mix() {
        let mut assembly = Assembly::new(false);
        let (first, second) = ([1; 2048].as_slice(), [2; 1024].as_slice());
        let mut put = |bytes: &[u8]| assembly.put(bytes, 4096);
        assert_eq!(put(&piece(7, 3075, 3072, b"end")), Ok(Put::More));
        assert_eq!(put(&piece(8, 2, 0, b"ab")), Ok(Put::Whole { id: 8 }));
        assert_eq!(assembly.buffer(), b"ab");
        let mut put = |bytes: &[u8]| assembly.put(bytes, 4096);
        assert_eq!(put(&piece(9, 5000, 0, &[3; 4096])), Ok(Put::More));
        assert_eq!(put(&piece(7, 3075, 2048, second)), Ok(Put::More));
        assert_eq!(put(&piece(7, 3075, 0, first)), Ok(Put::Whole { id: 7 }));
        assert_eq!(*assembly.buffer(), [first, second, b"end"].concat());
        assert_eq!(
            assembly.put(&piece(9, 5000, 4096, &[3; 904]), 4096),
            Ok(Put::TooLong { id: 9 })
        );
        assert!(assembly.buffer().is_empty());
        let Partials::Unordered(mixed) = &assembly.partials else { panic!("it is not ordered") };
        assert_eq!((mixed.partials.len(), mixed.context_bytes), (0, 0), "nothing is kept");
    }

    #[test]
    fn without_order_no_byte_comes_twice_and_no_piece_is_tiny() {
        let body = [1; 2048].as_slice();
        let huge = MESSAGE_BYTES_MAX as u32 + 1;
        check_malformed(
            false,
            &[
                &[piece(1, 5000, 0, body), piece(1, 5000, 0, body)],
                &[piece(1, 5000, 0, body), piece(1, 5000, 1024, body)],
                &[piece(1, 5000, 1024, body), piece(1, 5000, 0, body)],
                &[piece(1, 5000, 0, body), piece(1, 6000, 2048, body)],
                &[piece(1, 5000, 0, b"tiny")],
                &[piece(1, 5000, 0, b"")],
                &[piece(1, huge, 0, body)],
            ],
        );
    }

    #[test]
    fn without_order_what_is_kept_is_bounded() {
        for (bytes, of_message) in [(2048, 2048), (64 << 10, 64 << 10)] {
            let mut assembly = Assembly::new(false);
            let put = (0..).map(|id| assembly.put(&piece(id, bytes, 0, &[1; 1024]), of_message));
            let taken = put.take_while(Result::is_ok).count();
            let kept = taken * bytes as usize;
            assert!(taken <= PARTIALS_MAX && kept <= PARTIAL_BYTES + 4 * of_message, "{taken}");
        }
    }
}
