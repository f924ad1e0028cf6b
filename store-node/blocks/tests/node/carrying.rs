//! Pages of shares that an engine computes in its own pool: copied layer by layer, pushed and committed as if they had been
//! written into slots; and who is waited for when that ends early.

use kvasir_blocks::{AbortReason, AttachEpoch, Commit, Options, PoolError, ShareError, Tier};
use kvasir_proto::SlotIndex;

use crate::checker::tiers;
use crate::support::{BLOCK_TOKENS, EPOCH, Node, chain, key, namespace, options, request, share};

const LAYERS: u16 = 3;

struct Carrying {
    node: Node,
    slots: Vec<SlotIndex>,
}

impl Carrying {
    /// Share `1p` of a prompt of full blocks and one token more, bound to an engine that has a pool.
    fn new(prompt: &str) -> Self {
        Carrying::with(options(16), prompt)
    }

    fn with(options: Options, prompt: &str) -> Self {
        let mut node = Node::with(options);
        node.blocks.open_pool(EPOCH, 16);
        let slots = node.open("1p", prompt, 1).pages;
        Carrying { node, slots }
    }

    /// Pages of the share from this one on are computed in these pages of the pool.
    fn compute(&mut self, first: u32, pages: &[u32]) -> Result<(), PoolError> {
        let computed = self.node.blocks.compute_pages(EPOCH, (share("1p"), first), 5, pages);
        self.node.check();
        computed
    }

    /// So many layers of one page are finished. Answers with the copies that are asked for, as `page:layers`.
    fn finish(&mut self, page: u32, layers: u16) -> String {
        self.node.blocks.layers_computed(share("1p"), page..page + 1, layers);
        self.asked()
    }

    fn asked(&mut self) -> String {
        let before = self.node.carries.len();
        assert_eq!(self.node.actions(), "");
        let new = self.node.carries[before..].iter();
        new.map(|(_, page, of)| format!("{page}:{}-{}", of.start, of.end))
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// The copy that was asked for first has ended well, and what it makes whole is committed. Answers with the page of the
    /// share that it was for, if it counts.
    fn carried(&mut self) -> Option<u32> {
        let (copy, _, layers) = self.node.carries.remove(0);
        let carried = self.node.blocks.carried(copy);
        if let Some(carried) = &carried {
            assert_eq!((carried.share, carried.step), (share("1p"), 5));
            assert_eq!(carried.layers, layers);
            if layers.end == LAYERS && carried.page < 2 {
                self.node.commit("1p", carried.page);
            }
        }
        self.node.blocks.carry_ended(self.node.now_ms, copy, true);
        self.node.check();
        carried.map(|carried| carried.page)
    }

    fn drop(&mut self, handle: u64, pages: &[u32]) -> String {
        let now_ms = self.node.now_ms;
        self.node.blocks.drop_pages(now_ms, (EPOCH, handle), pages).expect("pages to drop");
        self.node.actions()
    }

    fn hold(&mut self, prompt: &str, page: u32) {
        let keys = chain(prompt);
        let [.., last] = keys[..] else { panic!("a prompt") };
        let parent = keys.len().checked_sub(2).map(|before| keys[before]);
        let of = (namespace(""), parent);
        let held = self.node.blocks.hold_pages(self.node.now_ms, EPOCH, of, &[last], &[page]);
        held.expect("a page to hold");
        self.node.check();
    }

    fn abort(&mut self) -> String {
        let why = AbortReason::Asked("test".into());
        self.node.blocks.abort(self.node.now_ms, share("1p"), why);
        self.node.actions()
    }
}

#[test]
fn each_layer_is_copied_once_and_the_last_one_makes_a_block() {
    let mut carrying = Carrying::new("ab");
    carrying.compute(0, &[4, 9, 2]).expect("pages of the pool");
    assert_eq!(carrying.node.blocks.counts().pool_computed, 3);
    assert_eq!(carrying.finish(0, 1), "4:0-1");
    assert_eq!(carrying.finish(1, 1), "9:0-1");
    // A jump gives the layers between together, when the copy before them is over.
    assert_eq!(carrying.finish(0, 3), "");
    assert_eq!(carrying.finish(0, 2), "", "a word that goes back gives nothing");
    assert_eq!(carrying.carried(), Some(0));
    assert_eq!(carrying.asked(), "4:1-3");
    assert_eq!(carrying.node.cached("a"), "");
    assert_eq!(carrying.finish(1, 3), "");
    assert_eq!(carrying.finish(2, 3), "2:0-3");
    assert_eq!((carrying.carried(), carrying.asked().as_str()), (Some(1), "9:1-3"));
    assert_eq!(carrying.carried(), Some(0));
    assert_eq!(carrying.node.cached("a ab"), "a");
    assert_eq!((carrying.carried(), carrying.carried()), (Some(2), Some(1)));
    assert_eq!(carrying.node.cached("a ab"), "a ab");
    assert_eq!(carrying.node.slot("ab"), carrying.slots[1]);
    assert_eq!(carrying.node.blocks.counts().layers_carried_total, 9);
    carrying.node.release("1p");
    assert_eq!(carrying.node.actions(), "Released(1p)");
    assert_eq!(carrying.drop(1, &[4, 9, 2]), "Dropped(1)");
    carrying.node.assert_idle();
}

#[test]
fn what_is_owed_at_the_release_is_copied_and_what_is_finished_later_is_not() {
    let mut carrying = Carrying::with(Options { carries_max: 1, ..options(16) }, "ab");
    carrying.compute(0, &[0, 1, 2]).expect("pages of the pool");
    assert_eq!(carrying.finish(0, 3), "0:0-3");
    assert_eq!(carrying.finish(1, 3), "", "one copy at once");
    assert_eq!(carrying.finish(2, 1), "");
    let counts = carrying.node.blocks.counts();
    assert_eq!((counts.carries, counts.carries_waiting), (1, 2));
    carrying.node.release("1p");
    assert_eq!(carrying.finish(2, 3), "");
    assert_eq!((carrying.carried(), carrying.asked().as_str()), (Some(0), "1:0-3"));
    assert_eq!((carrying.carried(), carrying.asked().as_str()), (Some(1), "2:0-1"));
    assert_eq!(carrying.carried(), Some(2));
    assert_eq!(carrying.node.actions(), "Released(1p)");
    assert_eq!(carrying.node.cached("a ab"), "a ab");
    assert_eq!(carrying.node.blocks.counts().free, 14);
}

#[test]
fn pages_go_back_when_all_that_is_finished_there_is_copied() {
    let mut carrying = Carrying::with(Options { carries_max: 1, ..options(16) }, "ab");
    carrying.compute(0, &[0, 1]).expect("pages of the pool");
    carrying.finish(0, 2);
    carrying.finish(1, 2);
    assert_eq!(carrying.drop(7, &[0, 1]), "");
    // Nobody may read there what comes after this.
    assert_eq!(carrying.finish(1, 3), "");
    assert_eq!((carrying.carried(), carrying.asked().as_str()), (Some(0), "1:0-2"));
    assert_eq!(carrying.carried(), Some(1));
    assert_eq!(carrying.node.actions(), "Dropped(7)");
    carrying.abort();
    carrying.node.release("1p");
    assert_eq!(carrying.node.actions(), "Aborted(1p)");
    carrying.node.assert_idle();
}

#[test]
fn an_aborted_share_has_its_slots_in_quarantine_until_the_last_copy_has_ended() {
    let mut carrying = Carrying::with(Options { carries_max: 2, ..options(16) }, "ab");
    carrying.compute(0, &[0, 1, 2]).expect("pages of the pool");
    (0..3).for_each(|page| drop(carrying.finish(page, 2)));
    assert_eq!(carrying.abort(), "StopEngine(1p)");
    assert_eq!(carrying.asked(), "", "nothing begins any more");
    assert_eq!(carrying.finish(0, 3), "");
    assert_eq!(carrying.node.blocks.counts().carries_given_up_total, 1);
    carrying.node.release("1p");
    assert_eq!(carrying.node.actions(), "");
    assert_eq!(carrying.drop(1, &[2]), "Dropped(1)", "nothing touches it");
    assert_eq!(carrying.drop(2, &[0, 1]), "");
    assert_eq!(carrying.carried(), None, "it counts for nothing");
    assert_eq!(carrying.node.blocks.counts().quarantined, 3);
    assert_eq!(carrying.node.actions(), "");
    assert_eq!(carrying.carried(), None);
    assert_eq!(carrying.node.actions(), "Dropped(2) Aborted(1p)");
    carrying.node.assert_idle();
}

#[test]
fn an_engine_that_is_gone_is_waited_for_no_more_but_its_copies_are() {
    let mut carrying = Carrying::new("ab");
    carrying.compute(0, &[0, 1]).expect("pages of the pool");
    carrying.finish(0, 2);
    carrying.finish(1, 2);
    carrying.node.blocks.engine_gone(carrying.node.now_ms, EPOCH);
    assert_eq!(carrying.node.actions(), "");
    assert_eq!(carrying.node.blocks.counts().quarantined, 3);
    // Another engine's pool has nothing to do with them.
    carrying.node.blocks.open_pool(AttachEpoch(2), 4);
    assert_eq!((carrying.carried(), carrying.carried()), (None, None));
    assert_eq!(carrying.node.actions(), "Aborted(1p)");
    carrying.node.assert_idle();
}

#[test]
fn a_released_share_whose_pool_closes_before_all_is_copied_is_aborted() {
    let mut carrying = Carrying::new("ab");
    carrying.compute(0, &[0, 1]).expect("pages of the pool");
    carrying.finish(0, 3);
    carrying.node.release("1p");
    carrying.node.blocks.engine_gone(carrying.node.now_ms, EPOCH);
    assert_eq!(carrying.node.actions(), "");
    assert_eq!(carrying.carried(), None);
    assert_eq!(carrying.node.actions(), "Aborted(1p)");
    assert_eq!(carrying.node.cached("a"), "");
}

#[test]
fn a_copy_that_fails_aborts_its_share() {
    let mut carrying = Carrying::new("ab");
    carrying.compute(0, &[0]).expect("pages of the pool");
    carrying.finish(0, 1);
    let (copy, ..) = carrying.node.carries.remove(0);
    carrying.node.blocks.carry_ended(carrying.node.now_ms, copy, false);
    assert_eq!(carrying.node.actions(), "StopEngine(1p)");
    assert_eq!(carrying.node.blocks.counts().carries_failed_total, 1);
    carrying.node.release("1p");
    assert_eq!(carrying.node.actions(), "Aborted(1p)");
    assert_eq!(carrying.drop(1, &[0]), "Dropped(1)");
    carrying.node.assert_idle();
}

#[test]
fn what_is_held_is_not_copied_twice() {
    let mut carrying = Carrying::new("ab");
    carrying.compute(0, &[0, 1]).expect("pages of the pool");
    carrying.finish(0, 3);
    carrying.finish(1, 3);
    carrying.hold("a", 0);
    carrying.hold("ab", 1);
    assert_eq!(tiers(&carrying.node.blocks.snapshot())[&key("ab")], Tier::Vram);
    // They are on their way already, also where the page is wanted back.
    assert_eq!(carrying.drop(1, &[1]), "");
    assert!(carrying.node.reads.is_empty());
    assert_eq!((carrying.carried(), carrying.carried()), (Some(0), Some(1)));
    assert_eq!(carrying.node.actions(), "Dropped(1)");
    assert_eq!(carrying.node.cached("a ab"), "a ab");
    carrying.node.release("1p");
    assert_eq!(carrying.node.actions(), "Released(1p)");
    assert!(carrying.node.reads.is_empty());
    carrying.node.assert_idle();
}

#[test]
fn what_is_held_and_does_not_come_with_its_share_is_copied_as_ever() {
    let mut carrying = Carrying::new("ab");
    carrying.compute(0, &[0]).expect("pages of the pool");
    carrying.finish(0, 3);
    carrying.hold("a", 0);
    assert_eq!(carrying.abort(), "StopEngine(1p)");
    assert_eq!(carrying.node.reads.len(), 1);
    assert_eq!(carrying.carried(), None);
    let (rise, _) = carrying.node.reads.remove(0);
    carrying.node.blocks.risen(carrying.node.now_ms, rise, Ok(1));
    carrying.node.release("1p");
    assert_eq!(carrying.node.actions(), "Aborted(1p)");
    assert_eq!(carrying.node.cached("a"), "a");
    carrying.node.assert_idle();
}

#[test]
fn a_block_of_which_layers_are_missing_is_not_committed() {
    let mut carrying = Carrying::new("ab");
    carrying.compute(0, &[0]).expect("pages of the pool");
    let blocks = &mut carrying.node.blocks;
    let missing = Err(ShareError::Refused("layers of the page are not in its slot yet"));
    assert_eq!(blocks.commit_page(share("1p"), 0, 1), missing, "nothing is there");
    carrying.finish(0, 2);
    carrying.finish(0, 3);
    let blocks = &mut carrying.node.blocks;
    assert_eq!(blocks.commit_page(share("1p"), 0, 1), missing, "two of three are coming");
    let theirs = blocks.commit_extra(share("1p"), 0, key("a"), 1);
    assert_eq!(theirs, Err(ShareError::Refused("the page is computed in the engine's pool")));
    assert_eq!((carrying.carried(), carrying.asked().as_str()), (Some(0), "0:2-3"));
    assert_eq!(carrying.node.blocks.commit_page(share("1p"), 0, 1), Ok(Commit::Indexed));
    let (copy, ..) = carrying.node.carries.remove(0);
    carrying.node.blocks.carry_ended(carrying.node.now_ms, copy, true);
    carrying.node.check();
}

#[test]
fn pages_that_are_not_to_be_computed_are_refused() {
    let mut carrying = Carrying::new("ab");
    assert_eq!(carrying.node.commit("1p", 0), Commit::Indexed);
    let not = |page| Err(PoolError::NotToCompute { page });
    assert_eq!(carrying.compute(0, &[3, 4]), not(0), "it is committed");
    assert_eq!(carrying.compute(1, &[3, 3]), Err(PoolError::Twice { page: 3 }));
    assert_eq!(carrying.compute(2, &[3, 4]), Err(PoolError::NotOfShare { pages: 3 }));
    assert_eq!(carrying.compute(1, &[3]), Ok(()));
    assert_eq!(carrying.compute(1, &[4]), not(1), "it is computed elsewhere");
    let taken = PoolError::Taken { page: 3, state: "being computed" };
    assert_eq!(carrying.compute(2, &[3]), Err(taken));
    assert!(carrying.node.blocks.is_computed_in_pool(share("1p"), 0..2));
    assert!(!carrying.node.blocks.is_computed_in_pool(share("1p"), 2..3));
    // What goes back is not computed a second time: it may have been pushed.
    assert_eq!(carrying.drop(1, &[3]), "Dropped(1)");
    assert_eq!(carrying.compute(1, &[4]), not(1));

    let blocks = &mut carrying.node.blocks;
    let other = AttachEpoch(2);
    assert_eq!(blocks.compute_pages(other, (share("1p"), 2), 5, &[0]), Err(PoolError::NoPool));
    blocks.open_pool(other, 4);
    // Of no share of its own, or of none that is there: its pages are its own as before.
    assert_eq!(blocks.compute_pages(other, (share("1p"), 2), 5, &[0]), Ok(()));
    assert_eq!(blocks.compute_pages(other, (share("9p"), 0), 5, &[1]), Ok(()));
    assert_eq!(blocks.counts().pool_computed, 0);
}

#[test]
fn a_page_that_another_node_writes_is_not_computed() {
    let mut node = Node::new(16);
    node.blocks.open_pool(EPOCH, 4);
    node.open("2d", "ab", 1);
    let decode = node.blocks.compute_pages(EPOCH, (share("2d"), 0), 5, &[0]);
    assert_eq!(decode, Err(PoolError::NotToCompute { page: 0 }));

    let mut fetch = request("3p", "ab", 1);
    (fetch.has_remote_writer, fetch.fetch_until_block) = (true, 1);
    node.allocate(&fetch).expect("there is room");
    node.blocks.bind(share("3p"), EPOCH).expect("nobody bound it before");
    // Its engine waits for the fetch, and has nothing to compute before.
    assert_eq!(node.blocks.compute_pages(EPOCH, (share("3p"), 0), 5, &[0]), Ok(()));
    assert_eq!(node.blocks.counts().pool_computed, 0);
    node.blocks.arrived(node.now_ms, share("3p"), vec![1]).expect("a fetch");
    let bound = format!("Bound/{BLOCK_TOKENS}(3p)");
    assert_eq!(node.actions(), bound);
    let cached = node.blocks.compute_pages(EPOCH, (share("3p"), 0), 5, &[0]);
    assert_eq!(cached, Err(PoolError::NotToCompute { page: 0 }));
    assert_eq!(node.blocks.compute_pages(EPOCH, (share("3p"), 1), 5, &[0, 1]), Ok(()));
    node.check();
}
