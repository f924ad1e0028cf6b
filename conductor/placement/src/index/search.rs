//! Finding where each node's prefix of a chain ends. A node's set is closed under prefix, so the
//! sets along a chain only shrink: the search looks for the places where they do, and does not
//! visit every block.

use kvasir_proto::BlockKey;

/// Interior keys that one step of a search looks at: the loads of one step do not depend on each
/// other, so that their cache misses overlap, and three steps suffice for 512 blocks.
const PROBES: usize = 7;

/// How many leading keys of the chain each node of `among` has, by `set`: into `held`, which says 0
/// of all of them before.
///
/// Exact when every node's set is closed under prefix. When one is not, the length given for it
/// still ends between a key that it has and one that it lacks, or at the end of the chain.
pub(super) fn lengths(
    keys: &[BlockKey],
    among: u64,
    set: &impl Fn(&BlockKey) -> u64,
    held: &mut [u32],
) {
    let (Some(first), Some(last)) = (keys.first(), keys.last()) else { return };
    let at_first = set(first) & among;
    if at_first == 0 {
        return;
    }
    let at_last = set(last) & at_first;
    set_lengths(held, at_last, keys.len());
    search(keys, set, Span { from: 0, to: keys.len() - 1, at_first, at_last }, held);
}

/// A stretch of the chain with the sets at both ends. Nodes in `at_first` and not in `at_last`
/// end within it.
#[derive(Clone, Copy)]
struct Span {
    from: usize,
    to: usize,
    at_first: u64,
    at_last: u64,
}

/// Finds where each node of the span ends. The depth is the logarithm of the span.
fn search(keys: &[BlockKey], set: &impl Fn(&BlockKey) -> u64, span: Span, held: &mut [u32]) {
    let Span { from, to, at_first, at_last } = span;
    let ending = at_first & !at_last;
    if ending == 0 {
        return;
    }
    if to == from + 1 {
        set_lengths(held, ending, to);
        return;
    }
    let probes = PROBES.min(to - from - 1);
    let place = |probe: usize| from + (probe + 1) * (to - from) / (probes + 1);
    let mut sets = [0; PROBES];
    for (probe, here) in sets[..probes].iter_mut().enumerate() {
        *here = set(&keys[place(probe)]);
    }
    let mut left = (from, at_first);
    for (probe, set_here) in sets[..probes].iter().enumerate() {
        let here = (place(probe), (set_here & left.1) | at_last);
        let inner = Span { from: left.0, to: here.0, at_first: left.1, at_last: here.1 };
        search(keys, set, inner, held);
        left = here;
    }
    search(keys, set, Span { from: left.0, to, at_first: left.1, at_last }, held);
}

fn set_lengths(held: &mut [u32], mut nodes: u64, blocks: usize) {
    while nodes != 0 {
        held[nodes.trailing_zeros() as usize] = blocks as u32;
        nodes &= nodes - 1;
    }
}
