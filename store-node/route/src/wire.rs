//! What travels: a query message, and the answer to it. Numbers are little-endian.
//!
//! | query | bytes |
//! | --- | --- |
//! | magic, version, dtype of rows | 4, 2, 2 |
//! | session, serial of the dispatch | 8, 8 |
//! | step, layer | 4, 4 |
//! | d_qk, d_v, scale (f32) | 4, 4, 4 |
//! | parts, query rows of all parts | 4, 4 |
//! | kind, heads, number ([`Kind`]) | 4, 4, 4 |
//! | each part: route, pins, first block, cached rows, query rows | 8, 8, 4, 4, 4 |
//! | query rows, part by part | rows × d_qk × dtype |
//! | of scores: a weight for each query row | rows × 4 |
//! | of selected rows: how many for each token, then which ones | tokens × 4, number × 4 |
//!
//! What is answered is in [`answer`]. Both come from another process: nothing in them is believed before it
//! is checked.

mod answer;

pub use answer::{
    ANSWER_HEADER_BYTES, Answer, Asked, Best, BestShape, MessageStatus, PartStatus, PartialShape,
    Reply, answer_room, read_answer, write_answer,
};

const QUERY_MAGIC: u32 = u32::from_le_bytes(*b"kvrq");
/// Of queries and answers.
const VERSION: u16 = 2;
/// Bytes of a query before its parts.
pub const QUERY_HEADER_BYTES: usize = 64;
/// Bytes of one part's description.
pub const PART_BYTES: usize = 28;
/// A message or its answer: what one write takes.
pub const MESSAGE_BYTES_MAX: usize = kvasir_transfer::INLINE_BYTES_MAX;
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

/// Room that a query of so many parts and rows takes, where all rows attend all.
pub fn query_room(parts: usize, rows: usize, d_qk: usize, dtype: WireDtype) -> usize {
    QUERY_HEADER_BYTES + parts * PART_BYTES + query_bytes(rows, d_qk, dtype)
}

/// Room that its answer takes at most.
pub fn partials_room(parts: usize, rows: usize, d_v: usize, dtype: WireDtype) -> usize {
    ANSWER_HEADER_BYTES + parts * 4 + partial_bytes(rows, d_v, dtype)
}

/// What is asked of a part's cached rows. Under selection both ends know what a token is: so many query
/// rows, one for each head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Every query row attends all of them.
    Dense,
    /// Query rows are an indexer's, always in f32. Answered is which `topk` rows score best for each token.
    Scores { heads: u32, topk: u32 },
    /// Each token attends the rows that are named for it, at least one; so many are named in all parts.
    Selected { heads: u32, named: u32 },
}

impl Kind {
    const DENSE: u32 = 0;
    const SCORES: u32 = 1;
    const SELECTED: u32 = 2;

    /// Kind, heads and number.
    fn code(self) -> [u32; 3] {
        match self {
            Kind::Dense => [Kind::DENSE, 0, 0],
            Kind::Scores { heads, topk } => [Kind::SCORES, heads, topk],
            Kind::Selected { heads, named } => [Kind::SELECTED, heads, named],
        }
    }

    fn from_code(code: [u32; 3]) -> Option<Self> {
        match code {
            [Kind::DENSE, 0, 0] => Some(Kind::Dense),
            [_, 0, _] | [_, _, 0] => None,
            [Kind::SCORES, heads, topk] => Some(Kind::Scores { heads, topk }),
            [Kind::SELECTED, heads, named] => Some(Kind::Selected { heads, named }),
            _ => None,
        }
    }

    /// Bytes behind so many query rows; `None` when they are not whole tokens.
    fn bytes_behind(self, rows: usize) -> Option<usize> {
        let whole = |heads: u32| rows.is_multiple_of(heads as usize);
        match self {
            Kind::Dense => Some(0),
            Kind::Scores { heads, .. } => whole(heads).then_some(rows.checked_mul(4)?),
            Kind::Selected { heads, named } => {
                let numbers = (rows / heads as usize).checked_add(named as usize)?;
                whole(heads).then_some(numbers.checked_mul(4)?)
            }
        }
    }
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
    /// As attention needs it, and the scale; scores do not.
    pub d_v: u32,
    pub scale: f32,
    pub kind: Kind,
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

/// What a part brings beside its description.
#[derive(Debug, Clone, Copy, Default)]
pub struct PartBody<'a> {
    /// `query_rows × d_qk`.
    pub values: &'a [f32],
    /// Of scores: one for each query row.
    pub weights: &'a [f32],
    /// Of selected rows: for each token those that it attends, in their order, none of them twice.
    pub selected: &'a [&'a [u32]],
}

/// Rows that tokens attend, one list after another.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lists {
    ends: Vec<usize>,
    rows: Vec<u32>,
}

impl Lists {
    pub fn of(&self, token: usize) -> &[u32] {
        let from = token.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.rows[from..self.ends[token]]
    }

    /// In all lists.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }
}

/// A query, checked and widened.
#[derive(Debug, Clone, PartialEq)]
pub struct Query {
    pub head: QueryHead,
    pub parts: Vec<Part>,
    /// Rows of `d_qk` values, part by part.
    pub values: Vec<f32>,
    /// Of scores: one for each query row.
    pub weights: Vec<f32>,
    /// Of selected rows: for each token of all parts.
    pub selected: Lists,
}

impl Query {
    /// Query rows of a part, within those of all.
    pub fn rows_of(&self, part: usize) -> std::ops::Range<usize> {
        let before = self.parts[..part].iter().map(|part| part.query_rows as usize).sum::<usize>();
        before..before + self.parts[part].query_rows as usize
    }

    /// Bytes of what is asked, without descriptions of parts.
    pub fn bytes(&self) -> usize {
        let rows = self.values.len() / self.head.d_qk as usize;
        let behind = self.head.kind.bytes_behind(rows).unwrap_or(0);
        query_bytes(rows, self.head.d_qk as usize, self.head.dtype) + behind
    }

    /// About how many values of the cache it is multiplied with. Its numbers are only what it says of itself.
    pub fn work(&self) -> u64 {
        let pairs = match self.head.kind {
            Kind::Selected { heads, named } => u64::from(heads) * u64::from(named),
            Kind::Dense | Kind::Scores { .. } => {
                let of = |part: &Part| u64::from(part.cached_rows) * u64::from(part.query_rows);
                self.parts.iter().map(of).fold(0, u64::saturating_add)
            }
        };
        pairs.saturating_mul(self.head.d_qk.into())
    }

    /// Room that its answer takes at most.
    pub fn answer_room(&self) -> usize {
        let head = &self.head;
        match head.kind {
            Kind::Dense | Kind::Selected { .. } => {
                let shape = |part: &Part| PartialShape {
                    rows: part.query_rows,
                    d_v: head.d_v,
                    dtype: head.dtype,
                };
                answer_room::<kvasir_attention::Partial>(self.parts.iter().map(shape))
            }
            Kind::Scores { heads, topk } => {
                let shape = |part: &Part| BestShape::new(part, heads, topk);
                answer_room::<Best>(self.parts.iter().map(shape))
            }
        }
    }
}

/// Bytes that are not what they must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("the message about routed queries is truncated")]
    Short,
    #[error("field `{0}` of the message about routed queries is invalid")]
    Field(&'static str),
}

/// Whether these are some of so many rows, in their order, each of them once.
fn are_rows(rows: &[u32], cached: u32) -> bool {
    rows.last().is_some_and(|last| *last < cached) && rows.is_sorted_by(|a, b| a < b)
}

/// Reads numbers off the front.
#[derive(Debug)]
pub struct Reader<'a>(&'a [u8]);

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

    fn kind(&mut self) -> Result<Kind, WireError> {
        let code = [self.u32()?, self.u32()?, self.u32()?];
        Kind::from_code(code).ok_or(WireError::Field("kind"))
    }

    fn u32s(&mut self, count: usize) -> Result<Vec<u32>, WireError> {
        let bytes = self.take(count.checked_mul(4).ok_or(WireError::Short)?)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|number| u32::from_le_bytes(*number)).collect())
    }

    /// For each token of the parts the rows that it attends: some, in their order, each of them once and
    /// one that the part has.
    fn lists(&mut self, parts: &[Part], heads: u32, named: u32) -> Result<Lists, WireError> {
        let tokens_of = |part: &Part| (part.query_rows / heads) as usize;
        let counts = self.u32s(parts.iter().map(tokens_of).sum())?;
        let total: u64 = counts.iter().map(|count| u64::from(*count)).sum();
        if total != u64::from(named) {
            return Err(WireError::Field("selected"));
        }
        let rows = self.u32s(named as usize)?;
        let mut lists = Lists { ends: Vec::with_capacity(counts.len()), rows };
        let cached = parts.iter().flat_map(|part| (0..tokens_of(part)).map(|_| part.cached_rows));
        let mut end = 0;
        for (token, (count, cached)) in counts.into_iter().zip(cached).enumerate() {
            end += count as usize;
            lists.ends.push(end);
            if !are_rows(lists.of(token), cached) {
                return Err(WireError::Field("selected"));
            }
        }
        Ok(lists)
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

/// Bytes of a query with these bodies.
pub fn query_bytes_of(head: &QueryHead, bodies: &[PartBody<'_>]) -> usize {
    let of = |body: &PartBody<'_>| {
        let lists: usize = body.selected.iter().map(|rows| 4 + rows.len() * 4).sum();
        PART_BYTES + body.values.len() * head.dtype.bytes() + body.weights.len() * 4 + lists
    };
    QUERY_HEADER_BYTES + bodies.iter().map(of).sum::<usize>()
}

/// Writes a query, with a body for each part.
pub fn write_query(out: &mut Vec<u8>, head: &QueryHead, parts: &[Part], bodies: &[PartBody<'_>]) {
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
    let [kind, heads, number] = head.kind.code();
    for number in [parts.len() as u32, total, kind, heads, number] {
        out.extend(number.to_le_bytes());
    }
    for part in parts {
        out.extend(part.route.to_le_bytes());
        out.extend(part.pins.to_le_bytes());
        for number in [part.first_block, part.cached_rows, part.query_rows] {
            out.extend(number.to_le_bytes());
        }
    }
    bodies.iter().for_each(|body| put_values(out, body.values, head.dtype));
    bodies.iter().for_each(|body| put_values(out, body.weights, WireDtype::F32));
    let lists = || bodies.iter().flat_map(|body| body.selected);
    lists().for_each(|rows| out.extend((rows.len() as u32).to_le_bytes()));
    lists().for_each(|rows| rows.iter().for_each(|row| out.extend(row.to_le_bytes())));
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
    let kind = reader.kind()?;
    let values = rows.checked_mul(d_qk).and_then(|values| values.checked_mul(dtype.bytes()));
    let list = parts.checked_mul(PART_BYTES);
    let all = values.zip(list).and_then(|(values, list)| values.checked_add(list));
    let all = all.zip(kind.bytes_behind(rows)).and_then(|(all, behind)| all.checked_add(behind));
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
    let kind = reader.kind()?;
    if d_v == 0 || d_v > d_qk || d_qk > WIDTH_MAX {
        return Err(WireError::Field("width"));
    }
    if !scale.is_finite() {
        return Err(WireError::Field("scale"));
    }
    if parts == 0 || parts > PARTS_MAX {
        return Err(WireError::Field("parts"));
    }
    // A score must be the same wherever it is computed: what it is made of is never rounded.
    if matches!(kind, Kind::Scores { .. }) && dtype != WireDtype::F32 {
        return Err(WireError::Field("dtype"));
    }
    // As many as there are bytes for, whatever it says.
    let mut list = Vec::with_capacity(parts.min(reader.0.len() / PART_BYTES));
    let mut total = 0u64;
    for _ in 0..parts {
        let part = Part {
            route: reader.u64()?,
            pins: reader.u64()?,
            first_block: reader.u32()?,
            cached_rows: reader.u32()?,
            query_rows: reader.u32()?,
        };
        let is_whole = kind.bytes_behind(part.query_rows as usize).is_some();
        if part.query_rows == 0 || part.cached_rows == 0 || !is_whole {
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
    let (mut weights, mut selected) = (Vec::new(), Lists::default());
    match kind {
        Kind::Dense => {}
        Kind::Scores { .. } => weights = reader.values(rows as usize, WireDtype::F32)?,
        Kind::Selected { heads, named } => selected = reader.lists(&list, heads, named)?,
    }
    let head = QueryHead { session, dispatch, dtype, d_qk, d_v, scale, kind };
    Ok(Query { head, parts: list, values, weights, selected })
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

    fn head(dtype: WireDtype, kind: Kind) -> QueryHead {
        let dispatch = Dispatch { serial: 9, step: 4, layer: 2 };
        QueryHead { session: 7, dispatch, dtype, d_qk: 3, d_v: 2, scale: 0.5, kind }
    }

    fn part(query_rows: u32) -> Part {
        Part { route: 1, pins: 2, first_block: 3, cached_rows: 5, query_rows }
    }

    const VALUES: [f32; 9] = [1.0, 2.0, 3.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0];
    const WEIGHTS: [f32; 3] = [0.5, -1.0, 2.0];

    fn dense(dtype: WireDtype) -> Vec<u8> {
        let mut bytes = Vec::new();
        let bodies =
            [&VALUES[..3], &VALUES[3..]].map(|values| PartBody { values, ..PartBody::default() });
        write_query(&mut bytes, &head(dtype, Kind::Dense), &[part(1), part(2)], &bodies);
        bytes
    }

    fn scores(dtype: WireDtype, heads: u32, topk: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        let values = [&VALUES[..3], &VALUES[3..]];
        let weights = [&WEIGHTS[..1], &WEIGHTS[1..]];
        let bodies: Vec<PartBody<'_>> = (values.iter().zip(&weights))
            .map(|(values, weights)| PartBody { values, weights, selected: &[] })
            .collect();
        let kind = Kind::Scores { heads, topk };
        write_query(&mut bytes, &head(dtype, kind), &[part(1), part(2)], &bodies);
        bytes
    }

    /// Of one head: a token in the first part and two in the second.
    fn selected(lists: [&[u32]; 3], named: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        let body = |values, selected| PartBody { values, weights: &[], selected };
        let bodies = [body(&VALUES[..3], &lists[..1]), body(&VALUES[3..], &lists[1..])];
        let head = head(WireDtype::F32, Kind::Selected { heads: 1, named });
        write_query(&mut bytes, &head, &[part(1), part(2)], &bodies);
        bytes
    }

    const LISTS: [&[u32]; 3] = [&[0, 4], &[3], &[0, 1, 2, 3, 4]];

    #[test]
    fn a_query_is_read_as_it_was_written_and_takes_the_room_that_was_said() {
        let room = query_room(2, 3, 3, WireDtype::F32);
        assert_eq!(dense(WireDtype::F32).len(), room);
        assert_eq!(scores(WireDtype::F32, 1, 8).len(), room + 12);
        assert_eq!(selected(LISTS, 8).len(), room + 12 + 32);
        let narrow = dense(WireDtype::Bf16);
        assert_eq!(narrow.len(), query_room(2, 3, 3, WireDtype::Bf16));
        for mut bytes in
            [dense(WireDtype::F32), narrow, scores(WireDtype::F32, 1, 8), selected(LISTS, 8)]
        {
            assert_eq!(query_length(&bytes[..QUERY_HEADER_BYTES]), Ok(bytes.len()));
            let length = bytes.len();
            bytes.extend([0; 10]);
            let read = read_query(&bytes).expect("a query");
            assert_eq!(read.head, head(read.head.dtype, read.head.kind));
            assert_eq!(read.parts, vec![part(1), part(2)]);
            assert_eq!(read.values, VALUES);
            assert_eq!(read.rows_of(1), 1..3);
            assert_eq!(QUERY_HEADER_BYTES + 2 * PART_BYTES + read.bytes(), length);
            match read.head.kind {
                Kind::Dense => assert_eq!((read.weights.len(), read.selected.rows()), (0, 0)),
                Kind::Scores { heads, topk } => {
                    assert_eq!((heads, topk, &read.weights[..]), (1, 8, &WEIGHTS[..]));
                }
                Kind::Selected { heads, named } => {
                    assert_eq!((heads, named), (1, 8));
                    assert_eq!([0, 1, 2].map(|token| read.selected.of(token)), LISTS);
                }
            }
        }
    }

    #[test]
    fn a_query_that_cannot_be_is_refused_and_never_read_beyond_its_end() {
        let good = dense(WireDtype::F32);
        for good in [good.clone(), scores(WireDtype::F32, 1, 8), selected(LISTS, 8)] {
            for end in 0..good.len() {
                assert!(read_query(&good[..end]).is_err(), "{end} bytes");
            }
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
        for (at, to) in [(52, 3), (52, 1), (52, 2), (56, 1), (60, 1)] {
            assert_eq!(changed(at, to), Err(WireError::Field("kind")), "{to} at {at}");
        }
        let mut infinite = good.clone();
        infinite[40..44].copy_from_slice(&f32::INFINITY.to_le_bytes());
        assert_eq!(read_query(&infinite), Err(WireError::Field("scale")));
    }

    #[test]
    fn scores_are_asked_in_full_precision_and_of_whole_tokens() {
        let refused = |bytes: Vec<u8>| read_query(&bytes).expect_err("refused");
        assert_eq!(refused(scores(WireDtype::Bf16, 1, 8)), WireError::Field("dtype"));
        assert_eq!(refused(scores(WireDtype::F32, 2, 8)), WireError::Field("rows"));
        assert_eq!(refused(scores(WireDtype::F32, 0, 8)), WireError::Field("kind"));
        assert_eq!(refused(scores(WireDtype::F32, 1, 0)), WireError::Field("kind"));
        assert_eq!(query_length(&scores(WireDtype::F32, 2, 8)), Err(WireError::Field("rows")));
    }

    #[test]
    fn rows_that_a_part_does_not_have_or_that_are_named_twice_are_refused() {
        let refused = |lists, named| read_query(&selected(lists, named)).expect_err("refused");
        let field = WireError::Field("selected");
        assert_eq!(refused([&[0, 5], &[3], &[1]], 4), field, "a row beyond the last");
        assert_eq!(refused([&[4, 0], &[3], &[1]], 4), field, "not in order");
        assert_eq!(refused([&[4, 4], &[3], &[1]], 4), field, "twice");
        assert_eq!(refused([&[4], &[], &[1]], 2), field, "a token without a row");
        assert_eq!(refused([&[0, 4], &[3], &[1]], 3), field, "more than was said");
        assert_eq!(refused([&[0, 4], &[3], &[1]], 5), field, "fewer than was said");
    }

    #[test]
    fn an_answer_has_the_room_of_what_was_asked() {
        let room = |bytes: Vec<u8>| read_query(&bytes).expect("a query").answer_room();
        let head = ANSWER_HEADER_BYTES + 2 * 4;
        assert_eq!(room(dense(WireDtype::F32)), head + 3 * (2 * 4 + 8));
        assert_eq!(room(dense(WireDtype::Bf16)), head + 3 * (2 * 2 + 8));
        assert_eq!(room(selected(LISTS, 8)), head + 3 * (2 * 4 + 8));
        assert_eq!(room(scores(WireDtype::F32, 1, 2)), head + 3 * 2 * 8);
        assert_eq!(room(scores(WireDtype::F32, 1, u32::MAX)), head + 3 * 5 * 8);
    }

    #[test]
    fn whatever_bytes_come_nothing_is_believed_of_them_that_cannot_be() {
        let good = [dense(WireDtype::F32), scores(WireDtype::F32, 1, 8), selected(LISTS, 8)];
        let mut state = 1u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % below
        };
        for turn in 0..60_000 {
            let mut bytes = good[turn % good.len()].clone();
            for _ in 0..=random(3) {
                let at = random(bytes.len());
                bytes[at] = [0, 1, 2, 255, random(256) as u8][random(5)];
            }
            bytes.truncate(bytes.len() - random(2) * random(bytes.len()));
            let _ = query_length(&bytes);
            let Ok(query) = read_query(&bytes) else { continue };
            let rows: usize = query.parts.iter().map(|part| part.query_rows as usize).sum();
            assert_eq!(query.values.len(), rows * query.head.d_qk as usize);
            assert!(query.answer_room() >= ANSWER_HEADER_BYTES && query.work() > 0);
            assert!(query.bytes() < bytes.len());
            if let Kind::Selected { heads, .. } = query.head.kind {
                let mut token = 0;
                for part in &query.parts {
                    for _ in 0..part.query_rows / heads {
                        assert!(are_rows(query.selected.of(token), part.cached_rows));
                        token += 1;
                    }
                }
            }
        }
    }
}
