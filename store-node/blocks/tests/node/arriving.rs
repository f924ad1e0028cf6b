//! What a remote writer sends: the decode side's pages, and fetches.

use kvasir_blocks::{AbortReason, Arrival, BindError, Binding, ShareError};

use crate::support::{EPOCH, Node, request, share, sums};

fn fetch(node: &mut Node, name: &str, prompt: &str, until: u32) {
    let mut request = request(name, prompt, 1);
    request.fetch_until_block = until;
    request.has_remote_writer = true;
    node.allocate(&request).expect("there is room");
}

#[test]
fn the_decode_side_is_bound_at_once_and_commits_when_all_has_arrived() {
    let mut node = Node::new(16);
    node.fill("1p", "a");
    node.allocate(&request("2d", "abc", 1)).expect("there is room");
    let Ok(Binding::Bound(bound)) = node.blocks.bind(share("2d"), EPOCH) else {
        panic!("the decode side does not wait to be bound");
    };
    assert_eq!((bound.slots.len(), bound.cached_tokens, bound.arrived), (4, 4, false));
    assert_eq!(node.cached("a ab abc"), "a");
    let arrived = node.blocks.arrived(0, share("2d"), sums(3));
    assert_eq!(arrived, Ok(Arrival::Settled { cached_blocks: 3 }));
    assert_eq!(node.cached("a ab abc"), "a ab abc");
    assert_eq!(node.blocks.checksum_of(node.slot("abc")), Some(101));
    let again = node.blocks.arrived(0, share("2d"), sums(3));
    assert_eq!(again, Ok(Arrival::Settled { cached_blocks: 3 }));
    node.release("2d");
    assert_eq!(node.actions(), "Released(2d)");
    node.assert_idle();
}

#[test]
fn an_engine_that_binds_after_the_arrival_is_told() {
    let mut node = Node::new(16);
    node.allocate(&request("1d", "ab", 0)).expect("there is room");
    node.blocks.arrived(0, share("1d"), sums(2)).expect("all arrived");
    let Ok(Binding::Bound(bound)) = node.blocks.bind(share("1d"), EPOCH) else {
        panic!("bound");
    };
    assert_eq!((bound.cached_tokens, bound.arrived), (8, true));
}

#[test]
fn an_arrival_that_does_not_fit_changes_nothing() {
    let mut node = Node::new(16);
    node.open("1d", "ab", 1);
    let refused = node.blocks.arrived(0, share("1d"), sums(2));
    assert_eq!(refused, Err(ShareError::Refused("there must be a checksum for each page")));
    assert_eq!(node.cached("a ab"), "");
    node.open("2p", "ab", 1);
    let refused = node.blocks.arrived(0, share("2p"), sums(0));
    assert_eq!(refused, Err(ShareError::Refused("the share has no remote writer")));
    assert_eq!(node.blocks.arrived(0, share("9d"), sums(1)), Err(ShareError::Unknown));
}

#[test]
fn a_bind_waits_for_the_fetch() {
    let mut node = Node::new(16);
    node.fill("1p", "a");
    fetch(&mut node, "2p", "abcd", 3);
    assert_eq!(node.blocks.bind(share("2p"), EPOCH), Ok(Binding::Waiting));
    assert_eq!(node.blocks.bind(share("2p"), EPOCH), Err(BindError::Taken));
    let commit = node.blocks.commit_page(share("2p"), 3, 0);
    assert_eq!(commit, Err(ShareError::Refused("no engine has bound the share")));
    let arrived = node.blocks.arrived(0, share("2p"), sums(2));
    assert_eq!(arrived, Ok(Arrival::Settled { cached_blocks: 3 }));
    assert_eq!(node.actions(), "Bound/12(2p)");
    assert_eq!(node.cached("a ab abc abcd"), "a ab abc");
    node.commit("2p", 3);
    node.release("2p");
    assert_eq!(
        (node.actions(), node.cached("abcd")),
        ("Released(2p)".to_owned(), "abcd".to_owned())
    );
    node.assert_idle();
}

#[test]
fn a_fetch_that_brought_less_is_settled_when_its_writer_has_stopped() {
    // (intact pages of the three) -> cached tokens, and what is found.
    let check = |good: usize, cut_off: bool, want_tokens: u32, want: &str| {
        let mut node = Node::new(16);
        fetch(&mut node, "2p", "abcd", 3);
        node.blocks.bind(share("2p"), EPOCH).expect("to bind");
        let early = node.blocks.settle_fetch(share("2p"), sums(good));
        assert_eq!(early, Err(ShareError::Refused("the remote writer may still write")));
        node.blocks.stop_writer(share("2p")).expect("it has one");
        node.blocks.stop_writer(share("2p")).expect("it has one");
        assert_eq!(node.actions(), "StopWriter(2p)", "asked once");
        let early = node.blocks.settle_fetch(share("2p"), sums(good));
        assert_eq!(early, Err(ShareError::Refused("the remote writer may still write")));
        if cut_off {
            node.blocks.writer_cut_off(0, share("2p"));
        } else {
            node.blocks.writer_stopped(0, share("2p"));
        }
        assert_eq!(node.actions(), "", "nothing is settled yet");
        let too_many = node.blocks.settle_fetch(share("2p"), sums(4));
        assert_eq!(
            too_many,
            Err(ShareError::Refused("there are more checksums than fetched pages"))
        );
        assert_eq!(node.blocks.settle_fetch(share("2p"), sums(good)), Ok(good as u32));
        assert_eq!(node.blocks.settle_fetch(share("2p"), sums(0)), Ok(good as u32), "again");
        assert_eq!(node.actions(), format!("Bound/{want_tokens}(2p)"));
        assert_eq!(node.cached("a ab abc abcd"), want);
        // The engine computes the rest.
        for page in good as u32..4 {
            node.commit("2p", page);
        }
        assert_eq!(node.cached("a ab abc abcd"), "a ab abc abcd");
        node.release("2p");
        assert_eq!(node.actions(), "Released(2p)");
        node.assert_idle();
    };
    check(0, true, 0, "");
    check(1, false, 4, "a");
    check(2, true, 8, "a ab");
    check(3, false, 12, "a ab abc");
}

#[test]
fn pages_that_all_landed_after_the_writer_was_asked_to_stop_are_good() {
    let mut node = Node::new(16);
    fetch(&mut node, "2p", "ab", 2);
    node.blocks.stop_writer(share("2p")).expect("it has one");
    let arrived = node.blocks.arrived(0, share("2p"), sums(2));
    assert_eq!(arrived, Ok(Arrival::Settled { cached_blocks: 2 }));
    node.blocks.writer_stopped(0, share("2p"));
    assert_eq!(node.blocks.settle_fetch(share("2p"), vec![]), Ok(2));
    node.check();
}

#[test]
fn only_a_fetch_can_be_settled_short() {
    let mut node = Node::new(16);
    node.open("1d", "ab", 1);
    node.blocks.writer_stopped(0, share("1d"));
    let refused = node.blocks.settle_fetch(share("1d"), sums(1));
    assert_eq!(refused, Err(ShareError::Refused("only the prefill side fetches")));
    node.open("2p", "ab", 1);
    let refused = node.blocks.settle_fetch(share("2p"), sums(0));
    assert_eq!(refused, Err(ShareError::Refused("the share has no remote writer")));
    let refused = node.blocks.stop_writer(share("2p"));
    assert_eq!(refused, Err(ShareError::Refused("the share has no remote writer")));
}

#[test]
fn what_arrives_for_an_aborted_share_is_not_committed_and_frees_it() {
    let mut node = Node::new(8);
    node.allocate(&request("1d", "ab", 1)).expect("there is room");
    node.blocks.abort(0, share("1d"), AbortReason::PeerLost);
    assert_eq!(node.actions(), "StopWriter(1d) CancelImm(1d)");
    assert_eq!(node.blocks.counts().quarantined, 3);
    assert_eq!(node.blocks.arrived(0, share("1d"), sums(3)), Ok(Arrival::Late));
    assert_eq!((node.actions(), node.cached("a ab")), ("Aborted(1d)".to_owned(), String::new()));
    node.assert_idle();
    assert_eq!(node.blocks.arrived(0, share("1d"), sums(3)), Err(ShareError::Finished));
}

#[test]
fn fetched_blocks_that_came_here_otherwise_meanwhile_stay_the_shares_own() {
    let mut node = Node::new(16);
    fetch(&mut node, "2p", "abc", 2);
    node.blocks.bind(share("2p"), EPOCH).expect("to bind");
    node.fill("3p", "ab");
    node.blocks.arrived(0, share("2p"), sums(2)).expect("all arrived");
    assert_eq!(node.actions(), "Bound/8(2p)");
    assert_eq!(node.blocks.counts().duplicates_total, 2);
    node.commit("2p", 2);
    node.release("2p");
    node.actions();
    node.assert_idle();
    assert_eq!(node.blocks.counts().committed, 3);
}
