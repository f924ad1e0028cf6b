//! The reference vectors of `tests/data/mla_partial`, by every kernel and strategy.

mod support;

use std::path::Path;

use half::bf16;
use kvasir_attention::{Partial, RowDtype, merge};
use safetensors::SafeTensors;
use support::{Paged, Way, assert_close, query};

struct Case {
    q: Vec<f32>,
    rows: Vec<f32>,
    d_qk: usize,
    d_v: usize,
    query_rows: usize,
    heads: usize,
    scale: f32,
    holders: usize,
    split: Vec<i32>,
    index: Option<(Vec<i32>, usize)>,
    whole: Partial,
    parts: Vec<Partial>,
}

fn load(name: &str) -> Case {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/mla_partial");
    let bytes = std::fs::read(dir.join(name).with_extension("safetensors")).expect("test data");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("a safetensors file");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let metadata = header.metadata().as_ref().expect("metadata");
    let tensor = |name: &str| file.tensor(name).expect("a tensor of this name");
    let shape = |name: &str| tensor(name).shape().to_vec();
    let halves = |name: &str| -> Vec<f32> {
        let (pairs, _) = tensor(name).data().as_chunks::<2>();
        pairs.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
    };
    let words = |name: &str| -> Vec<[u8; 4]> { tensor(name).data().as_chunks::<4>().0.to_vec() };
    let floats = |name: &str| words(name).into_iter().map(f32::from_le_bytes).collect::<Vec<_>>();
    let ints = |name: &str| words(name).into_iter().map(i32::from_le_bytes).collect::<Vec<_>>();
    let (queries, heads, d_qk) = (shape("q")[0], shape("q")[1], shape("q")[2]);
    let (d_v, query_rows) = (shape("o")[2], queries * heads);
    let holders: usize = metadata["holders"].parse().expect("a number");
    let (o, m, l) = (floats("part_o"), floats("part_m"), floats("part_l"));
    let parts = (0..holders)
        .map(|holder| Partial {
            o: o[holder * query_rows * d_v..][..query_rows * d_v].to_vec(),
            m: m[holder * query_rows..][..query_rows].to_vec(),
            l: l[holder * query_rows..][..query_rows].to_vec(),
        })
        .collect();
    let indexed = file.names().contains(&"index");
    Case {
        q: halves("q"),
        rows: halves("ckv"),
        d_qk,
        d_v,
        query_rows,
        heads,
        scale: metadata["scale"].parse().expect("a number"),
        holders,
        split: ints("split"),
        index: indexed.then(|| (ints("index"), shape("index")[1])),
        whole: Partial { o: floats("o"), m: floats("m"), l: floats("l") },
        parts,
    }
}

impl Case {
    /// The rows `keep` names, in pages.
    fn paged(&self, rows_per_page: usize, dtype: RowDtype, keep: impl Fn(usize) -> bool) -> Paged {
        let rows: Vec<&[f32]> = self.rows.chunks_exact(self.d_qk).collect();
        let kept: Vec<&[f32]> =
            rows.iter().enumerate().filter(|(t, _)| keep(*t)).map(|(_, row)| *row).collect();
        Paged::new(&kept, self.d_qk, rows_per_page, dtype)
    }
}

fn check(name: &str) {
    let case = load(name);
    let query = query(&case.q, case.d_qk, case.d_v, case.scale);
    for way in Way::all() {
        for (rows_per_page, dtype) in
            [(1, RowDtype::Bf16), (16, RowDtype::F32), (64, RowDtype::Bf16), (64, RowDtype::F32)]
        {
            let what = format!("{name}, {way:?}, pages of {rows_per_page} {dtype:?}");
            let whole = case.paged(rows_per_page, dtype, |_| true);
            assert_close(&way.attend(&query, &whole.list()), &case.whole, &what);
            let parts: Vec<Partial> = (0..case.holders)
                .map(|holder| {
                    let own = case.paged(rows_per_page, dtype, |t| case.split[t] == holder as i32);
                    let part = way.attend(&query, &own.list());
                    assert_close(&part, &case.parts[holder], &format!("{what}, part {holder}"));
                    part
                })
                .collect();
            assert_close(&merge(&parts, case.d_v), &case.whole, &format!("{what}, merged"));
        }
    }
}

#[test]
fn dense_cases_agree_with_the_reference_whole_split_and_merged() {
    for name in
        ["decode_h16", "decode_h128", "batch_odd_sizes", "narrow_model", "sharp_softmax", "one_row"]
    {
        check(name);
    }
}

#[test]
fn selected_rows_agree_with_the_reference() {
    let case = load("selected_64");
    let (index, k) = case.index.as_ref().expect("a selection");
    for way in Way::all() {
        let mut whole = Partial::empty(0, case.d_v);
        for (token, selected) in index.chunks_exact(*k).enumerate() {
            let values = &case.q[token * case.heads * case.d_qk..][..case.heads * case.d_qk];
            let query = query(values, case.d_qk, case.d_v, case.scale);
            let rows: Vec<&[f32]> = selected
                .iter()
                .filter(|&&t| t >= 0)
                .map(|&t| &case.rows[t as usize * case.d_qk..][..case.d_qk])
                .collect();
            let paged = Paged::new(&rows, case.d_qk, 1, RowDtype::Bf16);
            let part = way.attend(&query, &paged.list());
            whole.o.extend(part.o);
            whole.m.extend(part.m);
            whole.l.extend(part.l);
        }
        assert_eq!(whole.m.len(), case.query_rows);
        assert_close(&whole, &case.whole, &format!("selected_64, {way:?}"));
    }
}

#[test]
fn stored_parts_merge_to_the_stored_whole() {
    for name in ["decode_h16", "batch_odd_sizes", "one_row", "selected_64"] {
        let case = load(name);
        assert_close(&merge(&case.parts, case.d_v), &case.whole, name);
    }
}
