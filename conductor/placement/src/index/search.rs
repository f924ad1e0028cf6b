//! Finding where each node's prefix of a chain ends. A node's set is closed under prefix, so the
//! sets along a chain only shrink: the search looks for the places where they do, and does not
//! visit every block.

/// Interior places that one step of a search looks at: the loads of one step do not depend on each
/// other, so that their cache misses overlap. More of them make fewer steps and more loads in all: 6 was the
/// best of 4, 6 and 10, for chains of 100 and of 1,000 blocks alike.
const PROBES: usize = 6;
/// Places that are asked for at once, at most.
pub(super) const PLACES_MAX: usize = PROBES + 2;

/// How many leading keys of a chain of `blocks` each node of `among` has, into `held`, which says 0
/// of all of them before. `sets` tells who has the keys at some places of the chain.
///
/// Exact when every node's set is closed under prefix. When one is not, the length given for it
/// still ends between a key that it has and one that it lacks, or at the end of the chain.
pub(super) fn lengths(
    blocks: usize,
    among: u64,
    sets: &impl Fn(&[usize], &mut [u64]),
    held: &mut [u32],
) {
    let Some(to) = blocks.checked_sub(1) else { return };
    // Both ends and the first step at once, since most chains need it.
    let probes = PROBES.min(to.saturating_sub(1));
    let mut places = [0; PLACES_MAX];
    let mut found = [0; PLACES_MAX];
    for (probe, place) in places[2..2 + probes].iter_mut().enumerate() {
        *place = place_of(probe, probes, 0, to);
    }
    places[1] = to;
    sets(&places[..2 + probes], &mut found[..2 + probes]);
    let at_first = found[0] & among;
    let at_last = found[1] & at_first;
    set_lengths(held, at_last, blocks);
    let span = Span { from: 0, to, at_first, at_last };
    if span.is_open(held) {
        divide(sets, span, &places[2..2 + probes], &found[2..2 + probes], held);
    }
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

impl Span {
    /// Whether a search must go on within it; when it is as short as can be, it is settled here.
    fn is_open(&self, held: &mut [u32]) -> bool {
        let ending = self.at_first & !self.at_last;
        if ending != 0 && self.to <= self.from + 1 {
            set_lengths(held, ending, self.to);
        }
        ending != 0 && self.to > self.from + 1
    }
}

/// Finds where each node of the span ends. The depth is the logarithm of the span.
fn search(sets: &impl Fn(&[usize], &mut [u64]), span: Span, held: &mut [u32]) {
    if !span.is_open(held) {
        return;
    }
    let probes = PROBES.min(span.to - span.from - 1);
    let mut places = [0; PROBES];
    let mut found = [0; PROBES];
    for (probe, place) in places[..probes].iter_mut().enumerate() {
        *place = place_of(probe, probes, span.from, span.to);
    }
    sets(&places[..probes], &mut found[..probes]);
    divide(sets, span, &places[..probes], &found[..probes], held);
}

/// Searches on between places that were looked at.
fn divide(
    sets: &impl Fn(&[usize], &mut [u64]),
    span: Span,
    places: &[usize],
    found: &[u64],
    held: &mut [u32],
) {
    let mut left = (span.from, span.at_first);
    for (place, set) in places.iter().zip(found) {
        let here = (*place, (set & left.1) | span.at_last);
        let inner = Span { from: left.0, to: here.0, at_first: left.1, at_last: here.1 };
        search(sets, inner, held);
        left = here;
    }
    search(sets, Span { from: left.0, at_first: left.1, ..span }, held);
}

fn place_of(probe: usize, probes: usize, from: usize, to: usize) -> usize {
    from + (probe + 1) * (to - from) / (probes + 1)
}

fn set_lengths(held: &mut [u32], mut nodes: u64, blocks: usize) {
    while nodes != 0 {
        held[nodes.trailing_zeros() as usize] = blocks as u32;
        nodes &= nodes - 1;
    }
}
