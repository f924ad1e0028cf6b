//! Finding where each node's prefix of a chain ends. A node's set is closed under prefix, so the
//! sets along a chain only shrink: the search looks for the places where they do, and does not
//! visit every block.

use arrayvec::ArrayVec;

/// Stretches that a step divides together: the loads of one step do not depend on each other, so that their cache
/// misses overlap.
const TOGETHER: usize = 4;
/// Interior places of each of one, two, three or four stretches that one step of the search looks at. More of them make
/// fewer steps and more loads in all: 3 was the best of 1, 2, 3, 4 and 6 for any number of stretches, and for few
/// stretches some more are faster by 4 to 9 % with chains of 100 blocks, and as fast with 1,000.
const PROBES: [usize; TOGETHER] = [5, 4, 3, 3];
/// Places that are asked for at once, at most.
pub(super) const PLACES_MAX: usize = PROBES[TOGETHER - 1] * TOGETHER;
/// Some node ends in each open stretch, and in no other.
const OPEN_MAX: usize = u64::BITS as usize;

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
    let mut search = Search { held, open: ArrayVec::new() };
    // Both ends and the first step at once, since most chains need it.
    let mut places = Places::new();
    places.extend([0, to]);
    look_between(0, to, PROBES[0], &mut places);
    let found = look(sets, &places);
    let at_first = found[0] & among;
    let at_last = found[1] & at_first;
    set_lengths(search.held, at_last, blocks);
    let all = Span { from: 0, to, at_first, at_last };
    search.divide(all, &places[2..], &found[2..]);
    while !search.open.is_empty() {
        search.step(sets);
    }
}

/// Places to look at together.
type Places = ArrayVec<usize, PLACES_MAX>;

/// A stretch of the chain with the sets at both ends. Nodes in `at_first` and not in `at_last`
/// end within it.
#[derive(Clone, Copy)]
struct Span {
    from: usize,
    to: usize,
    at_first: u64,
    at_last: u64,
}

struct Search<'a> {
    held: &'a mut [u32],
    open: ArrayVec<Span, OPEN_MAX>,
}

impl Search<'_> {
    /// Divides some of the open stretches. The depth is the logarithm of the longest.
    fn step(&mut self, sets: &impl Fn(&[usize], &mut [u64])) {
        let taken = self.open.len() - self.open.len().min(TOGETHER);
        let spans: ArrayVec<Span, TOGETHER> = self.open.drain(taken..).collect();
        let (mut places, mut ends) = (Places::new(), ArrayVec::<usize, TOGETHER>::new());
        for span in &spans {
            look_between(span.from, span.to, PROBES[spans.len() - 1], &mut places);
            ends.push(places.len());
        }
        let found = look(sets, &places);
        let mut from = 0;
        for (span, end) in spans.into_iter().zip(ends) {
            self.divide(span, &places[from..end], &found[from..end]);
            from = end;
        }
    }

    /// Divides a stretch where it was looked at.
    fn divide(&mut self, span: Span, places: &[usize], found: &[u64]) {
        let mut left = (span.from, span.at_first);
        for (place, set) in places.iter().zip(found) {
            let here = (*place, (set & left.1) | span.at_last);
            self.open(Span { from: left.0, to: here.0, at_first: left.1, at_last: here.1 });
            left = here;
        }
        self.open(Span { from: left.0, at_first: left.1, ..span });
    }

    /// To be divided, unless no node ends in it or it is as short as can be.
    fn open(&mut self, span: Span) {
        let ending = span.at_first & !span.at_last;
        if ending == 0 {
            return;
        }
        if span.to <= span.from + 1 {
            return set_lengths(self.held, ending, span.to);
        }
        self.open.push(span);
    }
}

fn look_between(from: usize, to: usize, probes: usize, places: &mut Places) {
    let probes = probes.min((to - from).saturating_sub(1));
    places.extend((1..=probes).map(|probe| from + probe * (to - from) / (probes + 1)));
}

fn look(sets: &impl Fn(&[usize], &mut [u64]), places: &Places) -> [u64; PLACES_MAX] {
    let mut found = [0; PLACES_MAX];
    sets(places, &mut found[..places.len()]);
    found
}

fn set_lengths(held: &mut [u32], mut nodes: u64, blocks: usize) {
    while nodes != 0 {
        held[nodes.trailing_zeros() as usize] = blocks as u32;
        nodes &= nodes - 1;
    }
}
