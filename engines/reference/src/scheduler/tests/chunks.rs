//! Chunks in the scheduler: what is looked up, copied, computed alone and told.

use super::*;
use crate::scheduler::ChunkRequest;

/// A prompt of 300 tokens with chunks of whole pages.
fn ask(chunks: &[std::ops::Range<u32>]) -> Ask {
    let chunk = |positions: &std::ops::Range<u32>| ChunkRequest {
        positions: positions.clone(),
        routed: Vec::new(),
    };
    let chunks = chunks.iter().map(chunk).collect();
    Ask { chunks, ..Ask::new(Leg::Whole, 1, 300, 150) }
}

/// What the node was asked for: handle and keys.
fn lookups(bench: &Bench) -> Vec<(u64, Vec<u8>)> {
    let get = |message| match message {
        Message::Get(v1::GetBlocks { handle, keys, skip_promotion }) => {
            assert!(skip_promotion, "it does not look twice");
            Some((handle, keys))
        }
        _ => None,
    };
    bench.node.messages().into_iter().filter_map(get).collect()
}

fn unpinned(bench: &Bench) -> Vec<u64> {
    let unpin = |message| match message {
        Message::Unpin(v1::UnpinBlocks { handle }) => Some(handle),
        _ => None,
    };
    bench.node.messages().into_iter().filter_map(unpin).collect()
}

fn got(handle: u64, slots: Vec<u32>) -> ToEngine {
    ToEngine::Got(v1::GotBlocks { handle, slots, promoting_blocks: 0 })
}

/// In the toy model a token sees the one before it: what is before the last chunk does not matter.
fn expected(ask: &Ask, from: usize) -> Vec<u32> {
    greedy(&ask.prompt()[from..], 150)
}

fn nothing_is_shared(bench: &Bench, ask: &Ask) {
    assert_eq!((bench.planned(ask.share()), bench.commits()), (vec![], vec![]));
    assert_eq!(bench.node.releases(), [ask.share()]);
}

#[test]
fn a_chunk_that_the_node_has_is_copied_and_let_go() {
    let mut bench = bench(options());
    bench.node.state().grows_from = Some(500);
    let ask = ask(std::slice::from_ref(&(70..198)));
    let chunk = ask.prompt()[70..198].to_vec();
    bench.model.fill(&chunk, &[900, 901]);
    bench.model.fill(&ask.prompt()[..64], &ask.slots());
    let mut caller = bench.ask(&ask);
    bench.node.say(ask.bound(64));
    assert!(!bench.turn(), "nothing is computed before it is known what is there");
    let keys = keys::chain(NAMESPACE, &chunk, PAGE as usize);
    let [(handle, asked)] = &lookups(&bench)[..] else { panic!("one is asked for") };
    assert_eq!(*asked, kvasir_proto::BlockKey::concat(&keys));
    bench.node.say(got(*handle, vec![900, 901]));
    bench.run();
    let answered = caller.heard();
    assert_eq!((answered.tokens, answered.cached), (expected(&ask, 70), Some(64 + 128)));
    assert_eq!(bench.model.batches()[..2], [[(64, 6)], [(198, 100)]]);
    assert_eq!((unpinned(&bench), bench.computed()), (vec![*handle], 300 - 192));
    nothing_is_shared(&bench, &ask);
}

#[test]
fn a_chunk_of_which_the_node_lacks_a_block_is_computed_alone() {
    for slots in [vec![], vec![900]] {
        let mut bench = bench(options());
        bench.node.state().grows_from = Some(500);
        let ask = ask(std::slice::from_ref(&(70..198)));
        let mut caller = bench.ask(&ask);
        bench.node.say(ask.bound(0));
        bench.turn();
        let handle = lookups(&bench)[0].0;
        bench.node.say(got(handle, slots));
        bench.run();
        let answered = caller.heard();
        assert_eq!((answered.tokens, answered.cached), (expected(&ask, 70), Some(0)));
        let batches = [vec![(0, 100)], vec![(100, 28)], vec![(0, 70)], vec![(198, 100)]];
        assert_eq!(bench.model.batches()[..4], batches);
        assert_eq!((unpinned(&bench), bench.computed()), (vec![handle], 300));
        nothing_is_shared(&bench, &ask);
    }
}

#[test]
fn chunks_beside_one_another_get_their_places_one_by_one() {
    let mut bench = bench(options());
    bench.node.state().grows_from = Some(500);
    let ask = ask(&[1..65, 65..129, 192..256]);
    bench.model.fill(&ask.prompt()[65..129], &[900]);
    let mut caller = bench.ask(&ask);
    bench.node.say(ask.bound(0));
    for slots in [vec![], vec![900], vec![]] {
        while bench.turn() {}
        let handle = lookups(&bench).last().expect("asked").0;
        bench.node.say(got(handle, slots));
    }
    bench.run();
    assert_eq!(caller.heard().tokens, expected(&ask, 192));
    assert_eq!(unpinned(&bench), [1, 2, 3]);
    nothing_is_shared(&bench, &ask);
}

#[test]
fn what_the_node_pinned_for_a_request_that_has_ended_is_let_go() {
    let mut bench = bench(options());
    let ask = ask(std::slice::from_ref(&(70..198)));
    let caller = bench.ask(&ask);
    bench.node.say(ask.bound(0));
    bench.turn();
    drop(caller);
    bench.turn();
    assert!(bench.scheduler.is_empty());
    bench.node.say(got(lookups(&bench)[0].0, vec![900, 901]));
    bench.turn();
    assert_eq!(unpinned(&bench), [1]);
    assert!(bench.model.batches().is_empty());
}

#[test]
fn rows_that_are_said_to_be_there_from_a_chunk_on_are_refused() {
    let mut bench = bench(options());
    let ask = ask(std::slice::from_ref(&(70..198)));
    let mut caller = bench.ask(&ask);
    bench.node.say(ask.bound(128));
    bench.turn();
    assert_eq!(caller.heard().failed, Some(Code::Internal));
}
