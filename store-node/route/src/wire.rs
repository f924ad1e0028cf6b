//! What travels: a query message, and the answer to it. Numbers are little-endian.
//!
//! | query | bytes |
//! | --- | --- |
//! | magic, version, dtype of rows | 4, 2, 2 |
//! | session, serial of the dispatch | 8, 8 |
//! | step, layer | 4, 4 |
//! | d_qk, d_v, scale (f32) | 4, 4, 4 |
//! | parts, query rows of all parts | 4, 4 |
//! | each part: route, pins, first block, cached rows, query rows | 8, 8, 4, 4, 4 |
//! | query rows, part by part | rows × d_qk × dtype |
//!
//! | answer | bytes |
//! | --- | --- |
//! | magic, version, status | 4, 2, 2 |
//! | serial, step, layer of the query | 8, 4, 4 |
//! | parts | 4 |
//! | each part's status | 4 |
//! | each part that is well: o, m, l | rows × d_v × dtype, rows × 4, rows × 4 |
//!
//! Both come from another process: nothing in them is believed before it is checked.

use kvasir_attention::Partial;

const QUERY_MAGIC: u32 = u32::from_le_bytes(*b"kvrq");
const ANSWER_MAGIC: u32 = u32::from_le_bytes(*b"kvra");
const VERSION: u16 = 1;
/// Bytes of a query before its parts.
pub const QUERY_HEADER_BYTES: usize = 52;
/// Bytes of one part's description.
pub const PART_BYTES: usize = 28;
/// Bytes of an answer before the parts' statuses.
pub const ANSWER_HEADER_BYTES: usize = 28;
/// Parts of one message at most: one for each sequence of a batch and holder.
pub const PARTS_MAX: usize = 4096;
/// The widest row.
const WIDTH_MAX: u32 = 1 << 16;

/// How rows of queries and outputs travel. The largest logits and the denominators are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WireDtype {
    F32,
    Bf16,
}

impl WireDtype {
    /// Bytes of one value.
    pub fn bytes(self) -> usize {
        match self {
            WireDtype::F32 => 4,
            WireDtype::Bf16 => 2,
        }
    }

    /// By its name in configurations and namespaces.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "f32" => Some(WireDtype::F32),
            "bf16" => Some(WireDtype::Bf16),
            _ => None,
        }
    }

    fn code(self) -> u16 {
        match self {
            WireDtype::F32 => 1,
            WireDtype::Bf16 => 2,
        }
    }

    fn from_code(code: u16) -> Option<Self> {
        [WireDtype::F32, WireDtype::Bf16].into_iter().find(|dtype| dtype.code() == code)
    }
}

/// Bytes of a query of so many rows, without its head: what moves in place of cached rows.
pub fn query_bytes(rows: usize, d_qk: usize, dtype: WireDtype) -> usize {
    rows * d_qk * dtype.bytes()
}

/// Bytes of a partial of so many rows.
pub fn partial_bytes(rows: usize, d_v: usize, dtype: WireDtype) -> usize {
    rows * (d_v * dtype.bytes() + 8)
}

/// Room that a query of so many parts and rows takes.
pub fn query_room(parts: usize, rows: usize, d_qk: usize, dtype: WireDtype) -> usize {
    QUERY_HEADER_BYTES + parts * PART_BYTES + query_bytes(rows, d_qk, dtype)
}

/// Room that its answer takes at most.
pub fn answer_room(parts: usize, rows: usize, d_v: usize, dtype: WireDtype) -> usize {
    ANSWER_HEADER_BYTES + parts * 4 + partial_bytes(rows, d_v, dtype)
}

/// Which exchange of a session this is. A serial is never used twice in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dispatch {
    pub serial: u64,
    pub step: u32,
    pub layer: u32,
}

/// What all parts of a query share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryHead {
    pub session: u64,
    pub dispatch: Dispatch,
    pub dtype: WireDtype,
    pub d_qk: u32,
    pub d_v: u32,
    pub scale: f32,
}

/// One sequence's query rows, and the cached rows that they attend: the first `cached_rows` from the
/// beginning of a block of the route on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    pub route: u64,
    /// Stands for the namespace, the slots and their generations, as the holder gave it.
    pub pins: u64,
    pub first_block: u32,
    pub cached_rows: u32,
    pub query_rows: u32,
}

/// A query, checked and widened.
#[derive(Debug, Clone, PartialEq)]
pub struct Query {
    pub head: QueryHead,
    pub parts: Vec<Part>,
    /// Rows of `d_qk` values, part by part.
    pub values: Vec<f32>,
}

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

/// An answer, checked against its query.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub dispatch: Dispatch,
    pub status: MessageStatus,
    /// One for each part of the query, in its order.
    pub parts: Vec<Result<Partial, PartStatus>>,
}

/// Bytes that are not what they must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("it ends too early")]
    Short,
    #[error("`{0}` is not what it must be")]
    Field(&'static str),
}

/// Reads numbers off the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], WireError> {
        let (first, rest) = self.0.split_at_checked(bytes).ok_or(WireError::Short)?;
        self.0 = rest;
        Ok(first)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        Ok(self.take(N)?.try_into().expect("as many as were asked for"))
    }

    fn u16(&mut self) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Values of a dtype, as f32.
    fn values(&mut self, count: usize, dtype: WireDtype) -> Result<Vec<f32>, WireError> {
        let bytes = self.take(count.checked_mul(dtype.bytes()).ok_or(WireError::Short)?)?;
        Ok(match dtype {
            WireDtype::F32 => {
                bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
            }
            WireDtype::Bf16 => {
                let (values, _) = bytes.as_chunks::<2>();
                values.iter().map(|value| widened(u16::from_le_bytes(*value))).collect()
            }
        })
    }
}

/// The nearest value in bf16, of two as near the even one. Without a branch, so that the compiler does many at
/// once: a query is converted while a whole batch waits for it.
fn rounded(value: f32) -> u16 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // A quiet one, whatever of it does not fit.
    let nan = (bits >> 16) | 0x40;
    (if value.is_nan() { nan } else { nearest }) as u16
}

fn widened(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

fn put_values(out: &mut Vec<u8>, values: &[f32], dtype: WireDtype) {
    let at = out.len();
    out.resize(at + values.len() * dtype.bytes(), 0);
    let room = &mut out[at..];
    match dtype {
        WireDtype::F32 => {
            let (room, _) = room.as_chunks_mut::<4>();
            room.iter_mut().zip(values).for_each(|(to, value)| *to = value.to_le_bytes());
        }
        WireDtype::Bf16 => {
            let (room, _) = room.as_chunks_mut::<2>();
            let rounded = values.iter().map(|value| rounded(*value).to_le_bytes());
            room.iter_mut().zip(rounded).for_each(|(to, value)| *to = value);
        }
    }
}

/// Writes a query. `rows` are the parts' query rows, one slice for each part.
pub fn write_query(out: &mut Vec<u8>, head: &QueryHead, parts: &[Part], rows: &[&[f32]]) {
    out.extend(QUERY_MAGIC.to_le_bytes());
    out.extend(VERSION.to_le_bytes());
    out.extend(head.dtype.code().to_le_bytes());
    out.extend(head.session.to_le_bytes());
    out.extend(head.dispatch.serial.to_le_bytes());
    let total: u32 = parts.iter().map(|part| part.query_rows).sum();
    for number in [head.dispatch.step, head.dispatch.layer, head.d_qk, head.d_v] {
        out.extend(number.to_le_bytes());
    }
    out.extend(head.scale.to_le_bytes());
    out.extend((parts.len() as u32).to_le_bytes());
    out.extend(total.to_le_bytes());
    for part in parts {
        out.extend(part.route.to_le_bytes());
        out.extend(part.pins.to_le_bytes());
        for number in [part.first_block, part.cached_rows, part.query_rows] {
            out.extend(number.to_le_bytes());
        }
    }
    for values in rows {
        put_values(out, values, head.dtype);
    }
}

/// The length of the query whose head this is, as it says itself.
///
/// # Errors
/// [`WireError::Short`].
pub fn query_length(head: &[u8]) -> Result<usize, WireError> {
    let mut reader = Reader(head);
    reader.take(6)?;
    let dtype = WireDtype::from_code(reader.u16()?).ok_or(WireError::Field("dtype"))?;
    reader.take(24)?;
    let d_qk = reader.u32()? as usize;
    reader.take(8)?;
    let (parts, rows) = (reader.u32()? as usize, reader.u32()? as usize);
    let values = rows.checked_mul(d_qk).and_then(|values| values.checked_mul(dtype.bytes()));
    let list = parts.checked_mul(PART_BYTES);
    let all = values.zip(list).and_then(|(values, list)| values.checked_add(list));
    all.and_then(|all| all.checked_add(QUERY_HEADER_BYTES)).ok_or(WireError::Field("rows"))
}

/// Reads a query from the front of a slot; what lies behind it is not looked at.
///
/// # Errors
/// [`WireError`].
pub fn read_query(bytes: &[u8]) -> Result<Query, WireError> {
    let mut reader = Reader(bytes);
    if reader.u32()? != QUERY_MAGIC || reader.u16()? != VERSION {
        return Err(WireError::Field("magic"));
    }
    let dtype = WireDtype::from_code(reader.u16()?).ok_or(WireError::Field("dtype"))?;
    let session = reader.u64()?;
    let dispatch = Dispatch { serial: reader.u64()?, step: reader.u32()?, layer: reader.u32()? };
    let (d_qk, d_v) = (reader.u32()?, reader.u32()?);
    let scale = f32::from_bits(reader.u32()?);
    let (parts, rows) = (reader.u32()? as usize, reader.u32()?);
    if d_v == 0 || d_v > d_qk || d_qk > WIDTH_MAX {
        return Err(WireError::Field("width"));
    }
    if !scale.is_finite() {
        return Err(WireError::Field("scale"));
    }
    if parts == 0 || parts > PARTS_MAX {
        return Err(WireError::Field("parts"));
    }
    let mut list = Vec::with_capacity(parts);
    let mut total = 0u64;
    for _ in 0..parts {
        let part = Part {
            route: reader.u64()?,
            pins: reader.u64()?,
            first_block: reader.u32()?,
            cached_rows: reader.u32()?,
            query_rows: reader.u32()?,
        };
        if part.query_rows == 0 || part.cached_rows == 0 {
            return Err(WireError::Field("rows"));
        }
        total += u64::from(part.query_rows);
        list.push(part);
    }
    if total != u64::from(rows) {
        return Err(WireError::Field("rows"));
    }
    let count = (rows as usize).checked_mul(d_qk as usize).ok_or(WireError::Short)?;
    let values = reader.values(count, dtype)?;
    let head = QueryHead { session, dispatch, dtype, d_qk, d_v, scale };
    Ok(Query { head, parts: list, values })
}

/// Writes an answer.
pub fn write_answer(out: &mut Vec<u8>, answer: &Answer, dtype: WireDtype) {
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
    for partial in answer.parts.iter().flatten() {
        put_values(out, &partial.o, dtype);
        put_values(out, &partial.m, WireDtype::F32);
        put_values(out, &partial.l, WireDtype::F32);
    }
}

/// What an answer must fit.
#[derive(Debug, Clone)]
pub struct Asked {
    pub dispatch: Dispatch,
    /// Query rows of each part.
    pub rows: Vec<u32>,
    pub d_v: u32,
    pub dtype: WireDtype,
}

/// Reads an answer from the front of a slot.
///
/// # Errors
/// [`WireError`], also when it answers another query.
pub fn read_answer(bytes: &[u8], asked: &Asked) -> Result<Answer, WireError> {
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
    if count != asked.rows.len() {
        return Err(WireError::Field("parts"));
    }
    let statuses: Vec<PartStatus> = (0..count)
        .map(|_| {
            let known = PartStatus::ALL.get(reader.u32()? as usize);
            known.copied().ok_or(WireError::Field("part status"))
        })
        .collect::<Result<_, _>>()?;
    let mut parts = Vec::with_capacity(count);
    for (status, &rows) in statuses.into_iter().zip(&asked.rows) {
        if status != PartStatus::Computed {
            parts.push(Err(status));
            continue;
        }
        let rows = rows as usize;
        let partial = Partial {
            o: reader.values(rows * asked.d_v as usize, asked.dtype)?,
            m: reader.values(rows, WireDtype::F32)?,
            l: reader.values(rows, WireDtype::F32)?,
        };
        if !is_sound(&partial) {
            return Err(WireError::Field("partial"));
        }
        parts.push(Ok(partial));
    }
    Ok(Answer { dispatch, status, parts })
}

/// A partial over at least one row is made of numbers.
fn is_sound(partial: &Partial) -> bool {
    partial.l.iter().all(|l| l.is_finite() && *l > 0.0)
        && partial.m.iter().all(|m| m.is_finite())
        && partial.o.iter().all(|value| value.is_finite())
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn values_in_bf16_are_those_that_others_make() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(rounded(value), bf16::from_f32(value).to_bits(), "{value}");
            }
            let there = bf16::from_bits(high);
            let same = widened(high) == there.to_f32();
            assert!(same || (widened(high).is_nan() && there.is_nan()), "{high:#x}");
        }
    }

    fn head(dtype: WireDtype) -> QueryHead {
        let dispatch = Dispatch { serial: 9, step: 4, layer: 2 };
        QueryHead { session: 7, dispatch, dtype, d_qk: 3, d_v: 2, scale: 0.5 }
    }

    fn part(query_rows: u32) -> Part {
        Part { route: 1, pins: 2, first_block: 3, cached_rows: 5, query_rows }
    }

    fn query(dtype: WireDtype) -> Vec<u8> {
        let mut bytes = Vec::new();
        let rows = [vec![1.0, 2.0, 3.0], vec![4.0; 6]];
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        write_query(&mut bytes, &head(dtype), &[part(1), part(2)], &rows);
        bytes
    }

    #[test]
    fn a_query_is_read_as_it_was_written_and_takes_the_room_that_was_said() {
        for dtype in [WireDtype::F32, WireDtype::Bf16] {
            let mut bytes = query(dtype);
            assert_eq!(bytes.len(), query_room(2, 3, 3, dtype));
            assert_eq!(query_length(&bytes[..QUERY_HEADER_BYTES]), Ok(bytes.len()));
            bytes.extend([0; 10]);
            let read = read_query(&bytes).expect("a query");
            assert_eq!(read.head, head(dtype));
            assert_eq!(read.parts, vec![part(1), part(2)]);
            assert_eq!(read.values, [1.0, 2.0, 3.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]);
        }
    }

    #[test]
    fn a_query_that_cannot_be_is_refused_and_never_read_beyond_its_end() {
        let good = query(WireDtype::F32);
        for end in 0..good.len() {
            assert!(read_query(&good[..end]).is_err(), "{end} bytes");
        }
        let changed = |at: usize, to: u8| {
            let mut bytes = good.clone();
            bytes[at] = to;
            read_query(&bytes)
        };
        assert_eq!(changed(0, 0), Err(WireError::Field("magic")));
        assert_eq!(changed(4, 9), Err(WireError::Field("magic")));
        assert_eq!(changed(6, 9), Err(WireError::Field("dtype")));
        assert_eq!(changed(36, 4), Err(WireError::Field("width")));
        assert_eq!(changed(36, 0), Err(WireError::Field("width")));
        assert_eq!(changed(44, 0), Err(WireError::Field("parts")));
        assert_eq!(changed(47, 200), Err(WireError::Field("parts")));
        assert_eq!(changed(48, 4), Err(WireError::Field("rows")));
        assert_eq!(changed(51, 255), Err(WireError::Field("rows")));
        let mut infinite = good.clone();
        infinite[40..44].copy_from_slice(&f32::INFINITY.to_le_bytes());
        assert_eq!(read_query(&infinite), Err(WireError::Field("scale")));
    }

    fn asked() -> Asked {
        let dispatch = head(WireDtype::F32).dispatch;
        Asked { dispatch, rows: vec![1, 2], d_v: 2, dtype: WireDtype::F32 }
    }

    fn answer() -> Answer {
        let partial = Partial { o: vec![1.0, -2.0], m: vec![3.0], l: vec![4.0] };
        let parts = vec![Ok(partial), Err(PartStatus::NoRoute)];
        Answer { dispatch: asked().dispatch, status: MessageStatus::Taken, parts }
    }

    fn written(answer: &Answer) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_answer(&mut bytes, answer, WireDtype::F32);
        bytes
    }

    #[test]
    fn an_answer_is_read_as_it_was_written() {
        let bytes = written(&answer());
        assert!(bytes.len() <= answer_room(2, 3, 2, WireDtype::F32));
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
        let dispatch = Dispatch { serial: 8, ..asked().dispatch };
        let other = Asked { dispatch, ..asked() };
        let bytes = written(&answer());
        assert_eq!(read_answer(&bytes, &other), Err(WireError::Field("dispatch")));
        let fewer = Asked { rows: vec![1], ..asked() };
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
}
