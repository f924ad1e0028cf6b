//! How a write becomes frames. A write of at most `slice_bytes` is one frame, which carries the
//! immediate. A longer one is cut into slices that carry none; when every byte has landed, a seal (no
//! bytes) carries the immediate and the checksum of the whole. Paths differ in `slice_bytes`, so the
//! slices of one write may differ in length.

use kvasir_mutation::{Mutation, mutated};

/// One side of a paged write: page `i` lies at `offset + indices[i] * stride`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pages {
    pub offset: u64,
    pub stride: u64,
    pub indices: Vec<u32>,
}

impl Pages {
    fn place(&self, at: usize) -> Option<u64> {
        let index = u64::from(*self.indices.get(at)?);
        index.checked_mul(self.stride)?.checked_add(self.offset)
    }
}

/// The bytes that one operation moves: one write, or one for each page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shape {
    Single { source_offset: u64, target_offset: u64, bytes: u64, checksum: Option<u64> },
    Paged { source: Pages, target: Pages, page_bytes: u64, checksums: Vec<u64> },
}

/// One logical write of a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub source_offset: u64,
    pub target_offset: u64,
    pub bytes: u64,
    pub checksum: Option<u64>,
}

impl Piece {
    /// A part of it; the checksum is of the whole.
    pub(crate) fn slice(&self, start: u64, bytes: u64) -> Piece {
        Piece {
            source_offset: self.source_offset + start,
            target_offset: self.target_offset + start,
            bytes,
            checksum: None,
        }
    }
}

impl Shape {
    /// How many logical writes, and so counts, it has.
    pub fn writes(&self) -> usize {
        match self {
            Shape::Single { .. } => 1,
            Shape::Paged { source, .. } => source.indices.len(),
        }
    }

    /// Of all its logical writes.
    pub fn bytes(&self) -> u64 {
        match self {
            Shape::Single { bytes, .. } => *bytes,
            Shape::Paged { source, page_bytes, .. } => {
                page_bytes.saturating_mul(source.indices.len() as u64)
            }
        }
    }

    /// Whether it can be sent: lists agree, nothing overflows, and the source holds it. Whether the
    /// target does is for the receiver to say.
    ///
    /// # Errors
    /// A sentence for the caller.
    pub fn check(&self, source_bytes: u64) -> Result<(), &'static str> {
        if let Shape::Paged { source, target, checksums, .. } = self {
            if source.indices.len() != target.indices.len() {
                return Err("the index lists differ in length");
            }
            if !checksums.is_empty() && checksums.len() != source.indices.len() {
                return Err("each page must have a checksum, or none may have one");
            }
        }
        for at in 0..self.writes() {
            let piece = self.piece(at).ok_or("an offset overflows")?;
            let end = piece.source_offset.checked_add(piece.bytes);
            if end.is_none_or(|end| end > source_bytes) {
                return Err("the source range is outside its region");
            }
            if piece.target_offset.checked_add(piece.bytes).is_none() {
                return Err("an offset overflows");
            }
        }
        Ok(())
    }

    /// The logical write `at`; `None` beyond the last, or when its place overflows.
    pub fn piece(&self, at: usize) -> Option<Piece> {
        match self {
            Shape::Single { source_offset, target_offset, bytes, checksum } => {
                let (source_offset, target_offset) = (*source_offset, *target_offset);
                let piece =
                    Piece { source_offset, target_offset, bytes: *bytes, checksum: *checksum };
                (at == 0).then_some(piece)
            }
            Shape::Paged { source, target, page_bytes, checksums } => Some(Piece {
                source_offset: source.place(at)?,
                target_offset: target.place(at)?,
                bytes: *page_bytes,
                checksum: checksums.get(at).copied(),
            }),
        }
    }
}

/// What is cut next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Which logical write it belongs to.
    pub(crate) write: usize,
    pub(crate) piece: Piece,
    pub(crate) sliced: Sliced,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sliced {
    /// The whole logical write.
    Whole,
    /// A slice that begins so far behind the write's beginning; `piece` is the slice.
    Slice { start: u64 },
}

/// Where the cutting stands.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cutter {
    write: usize,
    sliced_bytes: u64,
}

impl Cutter {
    pub(crate) fn is_done(&self, shape: &Shape) -> bool {
        self.write >= shape.writes()
    }

    /// Leaves out whatever has not been cut.
    pub(crate) fn stop(&mut self) {
        self.write = usize::MAX;
    }

    pub(crate) fn next(&mut self, shape: &Shape, slice_bytes: u64) -> Option<Cut> {
        if self.is_done(shape) {
            return None;
        }
        let write = self.write;
        let piece = shape.piece(write)?;
        let start = self.sliced_bytes;
        let whole_max_bytes = slice_bytes - u64::from(mutated(Mutation::ShortWriteIsSplit));
        if start == 0 && piece.bytes <= whole_max_bytes {
            self.write += 1;
            return Some(Cut { write, piece, sliced: Sliced::Whole });
        }
        let bytes = slice_bytes.min(piece.bytes - start);
        self.sliced_bytes += bytes;
        if self.sliced_bytes == piece.bytes {
            self.write += 1;
            self.sliced_bytes = 0;
        }
        Some(Cut { write, piece: piece.slice(start, bytes), sliced: Sliced::Slice { start } })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn paged(source: &[u32], target: &[u32], checksums: &[u64]) -> Shape {
        Shape::Paged {
            source: Pages { offset: 10, stride: 100, indices: source.to_vec() },
            target: Pages { offset: 5, stride: 50, indices: target.to_vec() },
            page_bytes: 40,
            checksums: checksums.to_vec(),
        }
    }

    #[test]
    fn shapes_that_cannot_be_sent_say_why() {
        let check = |shape: Shape, source_bytes| shape.check(source_bytes).unwrap_err();
        assert!(paged(&[0, 3], &[7, 1], &[]).check(350).is_ok());
        assert!(check(paged(&[0, 3], &[7, 1], &[]), 349).contains("outside"));
        assert!(check(paged(&[0], &[7, 1], &[]), 999).contains("index lists"));
        assert!(check(paged(&[0, 3], &[7, 1], &[1]), 999).contains("checksum"));
        let (source_offset, target_offset, bytes) = (0, u64::MAX, 2);
        let single = Shape::Single { source_offset, target_offset, bytes, checksum: None };
        assert!(check(single, 2).contains("overflows"));
        let (source_offset, target_offset, bytes) = (u64::MAX, 0, 2);
        let single = Shape::Single { source_offset, target_offset, bytes, checksum: None };
        assert!(check(single, 2).contains("outside"));
    }

    #[test]
    fn pages_are_placed_by_their_own_index_on_each_side() {
        let shape = paged(&[0, 3], &[7, 1], &[11, 12]);
        let piece = shape.piece(1).expect("two pages");
        assert_eq!((piece.source_offset, piece.target_offset), (310, 55));
        assert_eq!(piece.checksum, Some(12));
        assert_eq!(shape.piece(2), None);
    }

    #[test]
    fn a_write_is_split_when_it_is_longer_than_a_slice_and_not_before() {
        let whole = |bytes| {
            let (source_offset, target_offset, checksum) = (0, 0, None);
            let shape = Shape::Single { source_offset, target_offset, bytes, checksum };
            let cut = Cutter::default().next(&shape, 1000).expect("it is not done");
            cut.sliced == Sliced::Whole
        };
        assert_eq!([0, 1, 999, 1000, 1001].map(whole), [true, true, true, true, false]);
    }

    proptest! {
        #[test]
        fn frames_cover_every_byte_once(bytes in 0u64..5_000, slice_bytes in prop::collection::vec(1u64..2_000, 1..4)) {
            let checksum = Some(9);
            let shape = Shape::Single { source_offset: 3, target_offset: 8, bytes, checksum };
            let mut cutter = Cutter::default();
            let mut covered = 0;
            let mut frames = 0;
            // Paths take turns.
            let mut of_path = slice_bytes.iter().copied().cycle();
            while let Some((slice_bytes, cut)) = of_path
                .next()
                .and_then(|slice_bytes| Some((slice_bytes, cutter.next(&shape, slice_bytes)?)))
            {
                prop_assert_eq!(cut.piece.source_offset, 3 + covered);
                prop_assert_eq!(cut.piece.target_offset, 8 + covered);
                prop_assert!(cut.piece.bytes <= slice_bytes);
                frames += 1;
                match cut.sliced {
                    Sliced::Whole => prop_assert_eq!((cut.piece.bytes, frames), (bytes, 1)),
                    Sliced::Slice { start } => {
                        prop_assert_eq!(start, covered);
                        prop_assert!(cut.piece.bytes > 0 && cut.piece.bytes < bytes);
                    }
                }
                covered += cut.piece.bytes;
            }
            prop_assert_eq!(covered, bytes);
        }
    }
}
