//! Every kernel of this machine beside the library that everybody uses.

use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use super::*;

fn bytes(count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..count).map(next).collect()
}

/// The sum of the bytes in pieces that end at these places, and what a copy of them is.
fn in_pieces(
    kernel: Kernel,
    bytes: &[u8],
    ends: &[usize],
    target_at: usize,
    stores: Stores,
) -> (u64, Vec<u8>) {
    let mut target = vec![0xa5; target_at + bytes.len() + 1];
    let mut sum = Checksum::with(kernel);
    let mut begin = 0;
    for end in ends.iter().copied().chain([bytes.len()]) {
        let piece = &bytes[begin..end];
        let to = &mut target[target_at + begin..][..piece.len()];
        // SAFETY: two slices of one length.
        unsafe { sum.add_and_copy(piece.as_ptr(), to.as_mut_ptr(), piece.len(), stores) };
        begin = end;
    }
    assert!(target[..target_at].iter().all(|byte| *byte == 0xa5), "nothing before the target");
    assert_eq!(target.pop(), Some(0xa5), "nothing after the target");
    (sum.sum(), target.split_off(target_at))
}

#[test]
fn every_length_has_the_sum_that_others_compute() {
    let all = bytes(4_200);
    for length in (0..=1_100).chain(2_000..2_100).chain(4_090..=4_200) {
        let bytes = &all[..length];
        assert_eq!(checksum(bytes), xxh3_64(bytes), "{length}");
        for kernel in Kernel::all() {
            let mut sum = Checksum::with(kernel);
            sum.add(bytes);
            assert_eq!(sum.sum(), xxh3_64(bytes), "{length} by {kernel:?}");
        }
    }
}

#[test]
fn a_sum_can_be_asked_for_on_the_way_and_begun_anew() {
    let all = bytes(3_000);
    let mut sum = Checksum::new();
    for (at, piece) in all.chunks(77).enumerate() {
        sum.add(piece);
        let so_far = (77 * (at + 1)).min(all.len());
        assert_eq!(sum.sum(), xxh3_64(&all[..so_far]));
    }
    sum.reset();
    assert_eq!(sum.sum(), xxh3_64(&[]));
    sum.add(&all[5..900]);
    assert_eq!(sum.sum(), xxh3_64(&all[5..900]));
}

#[test]
fn long_copies_are_whole_however_they_are_stored() {
    let all = bytes(200_000);
    for kernel in Kernel::all() {
        let ways = [Stores::Cached, Stores::Streaming];
        // Some of 64 places in a row are aligned.
        for (target_at, stores) in (0..64).flat_map(|at| ways.map(|stores| (at, stores))) {
            let (sum, copy) = in_pieces(kernel, &all, &[64, 100_000], target_at, stores);
            assert_eq!(sum, xxh3_64(&all), "{kernel:?} to {target_at}, {stores:?}");
            assert!(copy == all, "{kernel:?} to {target_at}, {stores:?}");
        }
    }
}

proptest! {
    #[test]
    fn pieces_have_the_sum_of_the_whole(
        length in 0..40_000_usize,
        cuts in prop::collection::vec(0.0..1.0_f64, 0..6),
        target_at in 0..70_usize,
        stores in prop_oneof![Just(Stores::Cached), Just(Stores::Streaming)],
    ) {
        let all = bytes(length);
        let mut ends: Vec<usize> = cuts.iter().map(|cut| (cut * length as f64) as usize).collect();
        ends.sort_unstable();
        for kernel in Kernel::all() {
            let (sum, copy) = in_pieces(kernel, &all, &ends, target_at, stores);
            prop_assert_eq!(sum, xxh3_64(&all), "{:?}", kernel);
            prop_assert!(copy == all, "{:?}", kernel);
        }
    }
}

#[test]
fn a_fold_is_of_every_checksum_and_their_order_and_of_one_it_is_that_one() {
    assert_eq!(fold(&[7]), 7);
    let bytes: Vec<u8> = [7_u64, 8, 9].iter().flat_map(|sum| sum.to_le_bytes()).collect();
    assert_eq!(fold(&[7, 8, 9]), xxh3_64(&bytes));
    let folds = [fold(&[]), fold(&[7, 8, 9]), fold(&[7, 9, 8]), fold(&[7, 8]), fold(&[7, 8, 10])];
    for (at, one) in folds.iter().enumerate() {
        assert!(!folds[..at].contains(one), "{folds:?}");
    }
}
