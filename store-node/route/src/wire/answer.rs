//! The answer to a query.
//!
//! | answer | bytes |
//! | --- | --- |
//! | magic, version, status | 4, 2, 2 |
//! | serial, step, layer of the query | 8, 4, 4 |
//! | parts | 4 |
//! | each part's status | 4 |
//! | of attention, each part that is well: o, m, l | rows × d_v × dtype, rows × 4, rows × 4 |
//! | of scores, each part that is well: for each token its best rows, then their scores | n × 4, n × 4 |
//!
//! How many rows are best follows from what was asked: `topk`, or all that the part has.

use kvasir_attention::Partial;
use kvasir_attention::index::Candidate;

use super::{
    Dispatch, Part, Reader, VERSION, WireDtype, WireError, are_rows, partial_bytes, put_values,
};

const ANSWER_MAGIC: u32 = u32::from_le_bytes(*b"kvra");
/// Bytes of an answer before the parts' statuses.
pub const ANSWER_HEADER_BYTES: usize = 28;

/// What became of a message as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageStatus {
    /// See each part.
    Taken,
    /// More flows than the holder takes at once: nothing was computed.
    Busy,
    /// It cannot be read, or is of another session.
    Malformed,
}

/// What became of one part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartStatus {
    Computed,
    /// The lease is over, or there never was such a route in this session.
    NoRoute,
    /// Other blocks, generations or another namespace than those that the route holds.
    OtherPins,
    /// Cached rows or a layer that the route does not have.
    OutOfRange,
    /// The rows have another width, or lie so that no kernel reads them.
    OtherShape,
}

impl MessageStatus {
    const ALL: [MessageStatus; 3] =
        [MessageStatus::Taken, MessageStatus::Busy, MessageStatus::Malformed];
}

impl PartStatus {
    const ALL: [PartStatus; 5] = [
        PartStatus::Computed,
        PartStatus::NoRoute,
        PartStatus::OtherPins,
        PartStatus::OutOfRange,
        PartStatus::OtherShape,
    ];
}

/// What a part is answered with.
pub trait Reply: Sized {
    /// What it must fit.
    type Shape: Copy + std::fmt::Debug + Send + Sync + 'static;

    /// Bytes that it takes at most.
    fn room(shape: &Self::Shape) -> usize;

    fn put(&self, out: &mut Vec<u8>, dtype: WireDtype);

    /// # Errors
    /// [`WireError`]
    fn get(reader: &mut Reader<'_>, shape: &Self::Shape) -> Result<Self, WireError>;
}

/// The partial of so many query rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartialShape {
    pub rows: u32,
    pub d_v: u32,
    pub dtype: WireDtype,
}

impl Reply for Partial {
    type Shape = PartialShape;

    fn room(shape: &PartialShape) -> usize {
        partial_bytes(shape.rows as usize, shape.d_v as usize, shape.dtype)
    }

    fn put(&self, out: &mut Vec<u8>, dtype: WireDtype) {
        put_values(out, &self.o, dtype);
        put_values(out, &self.m, WireDtype::F32);
        put_values(out, &self.l, WireDtype::F32);
    }

    fn get(reader: &mut Reader<'_>, shape: &PartialShape) -> Result<Self, WireError> {
        let rows = shape.rows as usize;
        let partial = Partial {
            o: reader.values(rows * shape.d_v as usize, shape.dtype)?,
            m: reader.values(rows, WireDtype::F32)?,
            l: reader.values(rows, WireDtype::F32)?,
        };
        if is_sound(&partial) { Ok(partial) } else { Err(WireError::Field("partial")) }
    }
}

/// A partial over at least one row is made of numbers.
fn is_sound(partial: &Partial) -> bool {
    partial.l.iter().all(|l| l.is_finite() && *l > 0.0)
        && partial.m.iter().all(|m| m.is_finite())
        && partial.o.iter().all(|value| value.is_finite())
}

/// For each token the rows of a part that score best, in their order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Best(pub Vec<Vec<Candidate>>);

/// So many rows of so many for each of so many tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BestShape {
    pub tokens: u32,
    pub cached_rows: u32,
    pub topk: u32,
}

impl BestShape {
    pub fn new(part: &Part, heads: u32, topk: u32) -> Self {
        let Part { cached_rows, query_rows, .. } = *part;
        BestShape { tokens: query_rows / heads, cached_rows, topk }
    }

    fn each(&self) -> usize {
        self.topk.min(self.cached_rows) as usize
    }
}

impl Reply for Best {
    type Shape = BestShape;

    fn room(shape: &BestShape) -> usize {
        (shape.tokens as usize).saturating_mul(shape.each()).saturating_mul(8)
    }

    fn put(&self, out: &mut Vec<u8>, _dtype: WireDtype) {
        for best in &self.0 {
            best.iter().for_each(|candidate| out.extend(candidate.row.to_le_bytes()));
            best.iter().for_each(|candidate| out.extend(candidate.score.to_le_bytes()));
        }
    }

    fn get(reader: &mut Reader<'_>, shape: &BestShape) -> Result<Self, WireError> {
        let mut token = || {
            let rows = reader.u32s(shape.each())?;
            let scores = reader.values(rows.len(), WireDtype::F32)?;
            if !are_rows(&rows, shape.cached_rows) || scores.iter().any(|score| !score.is_finite())
            {
                return Err(WireError::Field("best"));
            }
            Ok(rows.into_iter().zip(scores).map(|(row, score)| Candidate { row, score }).collect())
        };
        Ok(Best((0..shape.tokens).map(|_| token()).collect::<Result<_, _>>()?))
    }
}

/// Room that an answer takes at most.
pub fn answer_room<R: Reply>(parts: impl IntoIterator<Item = R::Shape>) -> usize {
    let room =
        |room: usize, shape: R::Shape| room.saturating_add(4).saturating_add(R::room(&shape));
    parts.into_iter().fold(ANSWER_HEADER_BYTES, room)
}

/// An answer, checked against its query.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer<R = Partial> {
    pub dispatch: Dispatch,
    pub status: MessageStatus,
    /// One for each part of the query, in its order.
    pub parts: Vec<Result<R, PartStatus>>,
}

/// Writes an answer.
pub fn write_answer<R: Reply>(out: &mut Vec<u8>, answer: &Answer<R>, dtype: WireDtype) {
    out.extend(ANSWER_MAGIC.to_le_bytes());
    out.extend(VERSION.to_le_bytes());
    let code = MessageStatus::ALL.iter().position(|status| *status == answer.status);
    out.extend((code.expect("all are listed") as u16).to_le_bytes());
    out.extend(answer.dispatch.serial.to_le_bytes());
    let parts = answer.parts.len() as u32;
    for number in [answer.dispatch.step, answer.dispatch.layer, parts] {
        out.extend(number.to_le_bytes());
    }
    for part in &answer.parts {
        let status = part.as_ref().err().copied().unwrap_or(PartStatus::Computed);
        let code = PartStatus::ALL.iter().position(|known| *known == status);
        out.extend((code.expect("all are listed") as u32).to_le_bytes());
    }
    answer.parts.iter().flatten().for_each(|reply| reply.put(out, dtype));
}

/// What an answer must fit.
#[derive(Debug, Clone)]
pub struct Asked<R: Reply = Partial> {
    pub dispatch: Dispatch,
    pub parts: Vec<R::Shape>,
}

impl<R: Reply> Asked<R> {
    /// Room that the answer takes at most.
    pub fn room(&self) -> usize {
        answer_room::<R>(self.parts.iter().copied())
    }
}

/// Reads an answer from the front of a slot.
///
/// # Errors
/// [`WireError`], also when it answers another query.
pub fn read_answer<R: Reply>(bytes: &[u8], asked: &Asked<R>) -> Result<Answer<R>, WireError> {
    let mut reader = Reader(bytes);
    if reader.u32()? != ANSWER_MAGIC || reader.u16()? != VERSION {
        return Err(WireError::Field("magic"));
    }
    let status = MessageStatus::ALL.get(usize::from(reader.u16()?)).copied();
    let status = status.ok_or(WireError::Field("status"))?;
    let dispatch = Dispatch { serial: reader.u64()?, step: reader.u32()?, layer: reader.u32()? };
    let count = reader.u32()? as usize;
    if status == MessageStatus::Malformed {
        return Ok(Answer { dispatch, status, parts: Vec::new() });
    }
    if dispatch != asked.dispatch {
        return Err(WireError::Field("dispatch"));
    }
    if status == MessageStatus::Busy {
        return Ok(Answer { dispatch, status, parts: Vec::new() });
    }
    if count != asked.parts.len() {
        return Err(WireError::Field("parts"));
    }
    let statuses: Vec<PartStatus> = (0..count)
        .map(|_| {
            let known = PartStatus::ALL.get(reader.u32()? as usize);
            known.copied().ok_or(WireError::Field("part status"))
        })
        .collect::<Result<_, _>>()?;
    let mut parts = Vec::with_capacity(count);
    for (status, shape) in statuses.into_iter().zip(&asked.parts) {
        parts.push(match status {
            PartStatus::Computed => Ok(R::get(&mut reader, shape)?),
            refused => Err(refused),
        });
    }
    Ok(Answer { dispatch, status, parts })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dispatch() -> Dispatch {
        Dispatch { serial: 9, step: 4, layer: 2 }
    }

    fn asked() -> Asked {
        let shape = |rows| PartialShape { rows, d_v: 2, dtype: WireDtype::F32 };
        Asked { dispatch: dispatch(), parts: vec![shape(1), shape(2)] }
    }

    fn answer() -> Answer {
        let partial = Partial { o: vec![1.0, -2.0], m: vec![3.0], l: vec![4.0] };
        let parts = vec![Ok(partial), Err(PartStatus::NoRoute)];
        Answer { dispatch: dispatch(), status: MessageStatus::Taken, parts }
    }

    fn written<R: Reply>(answer: &Answer<R>) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_answer(&mut bytes, answer, WireDtype::F32);
        bytes
    }

    #[test]
    fn an_answer_is_read_as_it_was_written() {
        let bytes = written(&answer());
        assert!(bytes.len() <= asked().room());
        assert_eq!(read_answer(&bytes, &asked()), Ok(answer()));
        for status in [MessageStatus::Busy, MessageStatus::Malformed] {
            let refused = Answer { status, parts: Vec::new(), ..answer() };
            assert_eq!(read_answer(&written(&refused), &asked()), Ok(refused));
        }
        for end in 0..bytes.len() {
            assert_eq!(read_answer(&bytes[..end], &asked()), Err(WireError::Short));
        }
    }

    #[test]
    fn an_answer_to_another_query_or_with_what_is_no_number_is_refused() {
        let other = Dispatch { serial: 8, ..dispatch() };
        let other = Asked { dispatch: other, ..asked() };
        let bytes = written(&answer());
        assert_eq!(read_answer(&bytes, &other), Err(WireError::Field("dispatch")));
        let fewer = Asked { parts: asked().parts[..1].to_vec(), ..asked() };
        assert_eq!(read_answer(&bytes, &fewer), Err(WireError::Field("parts")));
        for wrong in [
            Partial { o: vec![f32::NAN, 0.0], m: vec![0.0], l: vec![1.0] },
            Partial { o: vec![0.0, 0.0], m: vec![f32::NEG_INFINITY], l: vec![1.0] },
            Partial { o: vec![0.0, 0.0], m: vec![0.0], l: vec![0.0] },
        ] {
            let wrong = Answer { parts: vec![Ok(wrong), Err(PartStatus::NoRoute)], ..answer() };
            let read = read_answer(&written(&wrong), &asked());
            assert_eq!(read, Err(WireError::Field("partial")));
        }
    }

    fn best(rows: [[u32; 2]; 2], score: f32) -> Answer<Best> {
        let token = |rows: [u32; 2]| rows.map(|row| Candidate { row, score }).to_vec();
        let parts = vec![Ok(Best(rows.map(token).to_vec()))];
        Answer { dispatch: dispatch(), status: MessageStatus::Taken, parts }
    }

    fn asked_best() -> Asked<Best> {
        let shape = BestShape { tokens: 2, cached_rows: 7, topk: 2 };
        Asked { dispatch: dispatch(), parts: vec![shape] }
    }

    #[test]
    fn best_rows_are_read_as_they_were_written_and_no_others_are() {
        let good = best([[0, 6], [3, 4]], -1.5);
        let bytes = written(&good);
        assert_eq!(bytes.len(), asked_best().room());
        assert_eq!(read_answer(&bytes, &asked_best()), Ok(good));
        for end in 0..bytes.len() {
            assert_eq!(read_answer(&bytes[..end], &asked_best()), Err(WireError::Short));
        }
        for wrong in [
            best([[0, 7], [3, 4]], 1.0),
            best([[0, 6], [4, 3]], 1.0),
            best([[0, 6], [4, 4]], 1.0),
            best([[0, 6], [3, 4]], f32::NAN),
            best([[0, 6], [3, 4]], f32::INFINITY),
        ] {
            let read = read_answer(&written(&wrong), &asked_best());
            assert_eq!(read, Err(WireError::Field("best")), "{wrong:?}");
        }
    }

    #[test]
    fn a_part_of_fewer_rows_than_are_wanted_is_answered_with_all_of_them() {
        let shape = BestShape { tokens: 3, cached_rows: 7, topk: 2048 };
        assert_eq!(Best::room(&shape), 3 * 7 * 8);
    }
}
