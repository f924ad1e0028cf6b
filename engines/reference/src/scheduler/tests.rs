//! The scheduler against a fake node and a toy model: what is said, computed, answered and given
//! back, leg by leg and state by state.
//!
//! - [`bench`]: what the tests stand on
//! - [`chunks`]: chunks that are used at another offset
//! - [`walk`]: everything at once, in a random order

mod bench;
mod chunks;
mod walk;

use std::sync::atomic::Ordering;

use kvasir_proto::keys;
use kvasir_proto::v1::finished::Reason;
use kvasir_proto::v1::node_to_engine::Message as ToEngine;

use super::*;
use crate::fakes::{FakeNode, Heard, LAYERS, VOCAB, greedy, text_of};
use crate::tail::EngineTail;
use bench::*;

#[test]
fn a_prefill_leg_finishes_every_page_once_and_hands_the_first_token_over() {
    for (prefill_chunk_tokens, plans) in [
        (16, vec![(4, 0, 1), (8, 1, 1), (12, 2, 1), (13, 3, 1)]),
        (64, vec![(1, 0, 1), (2, 1, 1), (3, 2, 1), (4, 3, 1)]),
        (100, vec![(1, 0, 1), (2, 1, 3)]),
        (512, vec![(1, 0, 4)]),
    ] {
        let mut bench = bench(SchedulerOptions { prefill_chunk_tokens, ..options() });
        let ask = Ask::new(Leg::Prefill, 1, 200, 50);
        let mut caller = bench.ask(&ask);
        assert!(!bench.turn(), "nothing is computed before the slots are known");
        bench.node.say(ask.bound(0));
        bench.run();
        assert_eq!(bench.planned(ask.share()), plans, "chunk {prefill_chunk_tokens}");
        assert_eq!(bench.tail(), greedy(&ask.prompt(), 1)[0]);
        let last = bench.node.messages().split_off(bench.node.messages().len() - 2);
        assert!(matches!(last[..], [Message::FinishPrefill(_), Message::Release(_)]), "{last:?}");
        let answered = caller.heard();
        assert_eq!((answered.cached, answered.tokens.len()), (Some(0), 0));
        assert_eq!(answered.reason(), Reason::HandedOver);
        assert_eq!(answered.finished.expect("finished").computed_prompt_tokens, 200);
        assert!(bench.scheduler.is_empty());
    }
}

#[test]
fn a_plan_stands_before_its_step_and_progress_counts_its_layers() {
    let mut bench = bench(SchedulerOptions { prefill_chunk_tokens: 64, ..options() });
    let ask = Ask::new(Leg::Prefill, 1, 128, 1);
    let _caller = bench.ask(&ask);
    bench.node.say(ask.bound(0));
    bench.run();
    let mut planned = 0;
    let mut progress = Vec::new();
    for heard in bench.node.state().heard.clone() {
        match heard {
            Heard::Message(Message::Plan(plan)) => planned = plan.step,
            Heard::Message(_) => {}
            Heard::Progress { step, layers_done } => {
                assert_eq!(step, planned);
                progress.push((step, layers_done));
            }
        }
    }
    let layers = 1..=LAYERS as u16;
    let expected: Vec<_> =
        (1..=2).flat_map(|step| layers.clone().map(move |layer| (step, layer))).collect();
    assert_eq!(progress, expected);
}

#[test]
fn cached_rows_are_read_and_not_computed() {
    let mut bench = bench(options());
    let ask = Ask::new(Leg::Prefill, 1, 200, 1);
    bench.model.fill(&ask.prompt()[..128], &ask.slots());
    let mut caller = bench.ask(&ask);
    bench.node.say(ask.bound(128));
    bench.run();
    assert_eq!(bench.model.batches(), [[(128, 72)]]);
    assert_eq!(bench.planned(ask.share()), [(1, 2, 2)]);
    assert_eq!(bench.tail(), greedy(&ask.prompt(), 1)[0]);
    assert_eq!(caller.heard().cached, Some(128));
    assert_eq!(bench.computed(), 72);
}

#[test]
fn a_whole_leg_answers_the_same_whatever_the_chunks_and_the_cache() {
    for prefill_chunk_tokens in [16, 64, 100, 512] {
        for cached in [0, 64, 128] {
            let mut bench = bench(SchedulerOptions { prefill_chunk_tokens, ..options() });
            bench.node.state().grows_from = Some(500);
            let ask = Ask::new(Leg::Whole, 1, 150, 200);
            bench.model.fill(&ask.prompt()[..cached as usize], &ask.slots());
            let mut caller = bench.ask(&ask);
            bench.node.say(ask.bound(cached));
            bench.run();
            let answered = caller.heard();
            let expected = greedy(&ask.prompt(), 200);
            assert_eq!(answered.tokens, expected, "chunk {prefill_chunk_tokens}, cached {cached}");
            assert_eq!(answered.text, text_of(&expected));
            assert_eq!(answered.reason(), Reason::Length);
            assert_eq!(bench.computed(), u64::from(150 - cached));
            assert_eq!(bench.node.releases(), [ask.share()]);
        }
    }
}

#[test]
fn blocks_that_an_answer_fills_are_committed_once_their_last_row_is_there() {
    let mut bench = bench(options());
    bench.node.state().grows_from = Some(500);
    let ask = Ask::new(Leg::Whole, 1, 150, 107);
    let _caller = bench.ask(&ask);
    bench.node.say(ask.bound(0));
    bench.run();
    // The last of 107 tokens has no row: 256 rows are there, and they are exactly four blocks.
    let mut tokens = ask.prompt();
    tokens.extend(greedy(&tokens, 106));
    let chain = keys::chain(NAMESPACE, &tokens, PAGE as usize);
    assert_eq!(chain.len(), 4);
    assert_eq!(bench.commits(), [(2, vec![chain[2]]), (3, vec![chain[3]])]);
    // The prompt's full blocks come with the plan; its partial page goes on to be written.
    assert_eq!(bench.planned(ask.share()), [(1, 0, 1), (2, 1, 1)]);
}

#[test]
fn a_decode_leg_computes_no_prompt_token_and_answers_like_a_whole_one() {
    let mut bench = bench(options());
    bench.node.state().grows_from = Some(500);
    let ask = Ask::new(Leg::Decode, 1, 150, 100);
    let expected = greedy(&ask.prompt(), 100);
    bench.model.fill(&ask.prompt(), &ask.slots());
    let mut caller = bench.ask(&ask);
    bench.node.say(ask.bound(64));
    assert!(!bench.turn(), "rows are still on their way");
    bench.node.say(ask.ready(expected[0]));
    bench.run();
    let answered = caller.heard();
    assert_eq!(answered.tokens, expected);
    assert_eq!(answered.text, text_of(&expected));
    assert_eq!((bench.computed(), answered.cached), (0, Some(64)));
    let steps: Vec<_> = (150..249).map(|at| vec![(at, 1)]).collect();
    assert_eq!(bench.model.batches(), steps);
    assert_eq!(bench.planned(ask.share()), []);
    let mut tokens = ask.prompt();
    tokens.extend(&expected);
    let chain = keys::chain(NAMESPACE, &tokens[..249], PAGE as usize);
    assert_eq!(bench.commits(), [(2, vec![chain[2]])]);
}

#[test]
fn the_answer_of_one_token_needs_no_step_and_no_slot_on_the_decode_side() {
    let mut bench = bench(options());
    let ask = Ask::new(Leg::Decode, 1, 128, 1);
    let mut caller = bench.ask(&ask);
    bench.node.say(ask.bound(0));
    bench.node.say(ask.ready(5));
    bench.run();
    assert_eq!(caller.heard().tokens, [5]);
    assert!(bench.model.batches().is_empty());
    let messages = bench.node.messages();
    assert!(!messages.iter().any(|message| matches!(message, Message::Grow(_))), "{messages:?}");
}

#[test]
fn decoding_goes_on_beside_prompts_that_share_the_chunk() {
    let mut bench = bench(options());
    bench.node.state().grows_from = Some(500);
    let decoding = Ask::new(Leg::Decode, 1, 10, 40);
    bench.model.fill(&decoding.prompt(), &decoding.slots());
    let mut decoded = bench.ask(&decoding);
    let prompts = [Ask::new(Leg::Whole, 2, 130, 1), Ask::new(Leg::Prefill, 3, 90, 1)];
    let mut callers: Vec<Caller> = prompts.iter().map(|ask| bench.ask(ask)).collect();
    bench.node.say(decoding.bound(0));
    bench.node.say(decoding.ready(greedy(&decoding.prompt(), 1)[0]));
    for ask in &prompts {
        bench.node.say(ask.bound(0));
    }
    bench.run();
    let expected = [
        vec![(10, 1), (0, 100)],
        vec![(11, 1), (100, 30), (0, 70)],
        vec![(12, 1), (70, 20)],
        vec![(13, 1)],
    ];
    assert_eq!(bench.model.batches()[..4], expected);
    assert_eq!(decoded.heard().tokens, greedy(&decoding.prompt(), 40));
    assert_eq!(callers[0].heard().tokens, greedy(&prompts[0].prompt(), 1));
    assert_eq!(bench.tail(), greedy(&prompts[1].prompt(), 1)[0]);
}

#[test]
fn a_prompt_with_a_delay_is_passed_between_two_steps_by_what_counts_as_earlier() {
    let check = |priority_delay_us: u64, expected: &[Vec<(u32, usize)>]| {
        let mut bench = bench(options());
        let long = Ask { priority_delay_us, ..Ask::new(Leg::Prefill, 2, 300, 1) };
        let short = Ask { priority_delay_us: 90, ..Ask::new(Leg::Prefill, 3, 90, 1) };
        let mut waits = bench.ask(&long);
        bench.node.say(long.bound(0));
        assert!(bench.turn());
        let mut passes = bench.ask(&short);
        bench.node.say(short.bound(0));
        bench.run();
        assert_eq!(bench.model.batches(), expected, "{priority_delay_us}");
        assert_eq!(passes.heard().reason(), Reason::HandedOver);
        let finished = waits.heard().finished.expect("finished");
        assert_eq!(finished.reason(), Reason::HandedOver);
    };
    // Two thirds of the delay are left after the first step.
    check(300, &[vec![(0, 100)], vec![(0, 90), (100, 10)], vec![(110, 100)], vec![(210, 90)]]);
    check(135, &[vec![(0, 100)], vec![(100, 100)], vec![(200, 100)], vec![(0, 90)]]);
    check(0, &[vec![(0, 100)], vec![(100, 100)], vec![(200, 100)], vec![(0, 90)]]);
}

#[test]
fn a_running_sequence_keeps_its_seat_and_the_next_one_waits() {
    let mut bench = bench(SchedulerOptions { running_requests_max: 2, ..options() });
    let asks: Vec<Ask> =
        (1..=4).map(|serial| Ask::new(Leg::Whole, serial, 8, 4 + serial as u32)).collect();
    let mut callers: Vec<Caller> = asks.iter().map(|ask| bench.ask(ask)).collect();
    for ask in asks.iter().rev() {
        bench.node.say(ask.bound(0));
    }
    bench.run();
    assert!(bench.model.batches().iter().all(|batch| batch.len() <= 2));
    assert_eq!(bench.model.batches()[0].len(), 2);
    for (ask, caller) in asks.iter().zip(&mut callers) {
        let expected = greedy(&ask.prompt(), ask.answer.max_tokens as usize);
        assert_eq!(caller.heard().tokens, expected);
    }
}

#[test]
fn the_first_token_waits_for_a_seat_and_the_second_follows_it_at_once() {
    let mut bench = bench(SchedulerOptions { running_requests_max: 2, ..options() });
    let asks: Vec<Ask> =
        (1..=5).map(|serial| Ask::new(Leg::Decode, serial, 8, 4 + serial as u32)).collect();
    let mut callers: Vec<Caller> = asks.iter().map(|ask| bench.ask(ask)).collect();
    for ask in &asks {
        bench.model.fill(&ask.prompt(), &ask.slots());
        bench.node.say(ask.bound(0));
        bench.node.say(ask.ready(greedy(&ask.prompt(), 1)[0]));
    }
    let mut heard = vec![Vec::new(); asks.len()];
    let mut finished = vec![None; asks.len()];
    let mut waited = 0;
    for turn in 1.. {
        bench.now_us.store(turn * 1_000, Ordering::Relaxed);
        let stepped = bench.turn();
        for (at, caller) in callers.iter_mut().enumerate() {
            if finished[at].is_none() {
                let answered = caller.heard();
                heard[at].extend(answered.tokens);
                finished[at] = answered.finished;
            }
        }
        assert!(heard.iter().all(|tokens| tokens.len() != 1), "turn {turn}: {heard:?}");
        waited += heard.iter().filter(|tokens| tokens.is_empty()).count();
        if !stepped {
            break;
        }
    }
    assert!(waited > 3, "three had no seat at first");
    for (ask, tokens) in asks.iter().zip(&heard) {
        assert_eq!(*tokens, greedy(&ask.prompt(), ask.answer.max_tokens as usize));
    }
    let queued: Vec<u64> = finished.iter().flatten().map(|finished| finished.queue_us).collect();
    assert_eq!(queued[..2], [999, 999]);
    assert!(queued[2] > 3_000 && queued.is_sorted(), "{queued:?}");
}

#[test]
fn an_answer_of_one_token_waits_for_no_seat() {
    let mut bench = bench(SchedulerOptions { running_requests_max: 1, ..options() });
    let long = Ask::new(Leg::Decode, 1, 8, 40);
    let one = Ask::new(Leg::Decode, 2, 8, 1);
    let mut stopped = Ask::new(Leg::Decode, 3, 8, 40);
    stopped.answer.stop_tokens.insert(5);
    let mut callers = [&long, &one, &stopped].map(|ask| {
        bench.model.fill(&ask.prompt(), &ask.slots());
        let caller = bench.ask(ask);
        bench.node.say(ask.bound(0));
        bench.node.say(ask.ready(5));
        caller
    });
    bench.turn();
    assert_eq!(callers[0].heard().tokens.len(), 2);
    let answered = callers[1].heard();
    assert_eq!((answered.tokens.clone(), answered.reason()), (vec![5], Reason::Length));
    let answered = callers[2].heard();
    assert_eq!((answered.tokens.clone(), answered.reason()), (vec![5], Reason::Stop));
    assert_eq!(bench.node.releases(), [one.share(), stopped.share()]);
}

/// Brings a request into each state in turn; says what to expect of it.
fn in_each_state(mut check: impl FnMut(Bench, Ask, Caller, &str)) {
    for state in ["binding", "arriving", "prefilling", "decoding", "short of room"] {
        let leg = match state {
            "arriving" | "decoding" => Leg::Decode,
            _ => Leg::Whole,
        };
        let mut bench = bench(SchedulerOptions { prefill_chunk_tokens: 16, ..options() });
        let ask = Ask::new(leg, 1, 64, 50);
        bench.model.fill(&ask.prompt(), &ask.slots());
        let caller = bench.ask(&ask);
        if state != "binding" {
            bench.node.say(ask.bound(0));
            bench.turn();
        }
        if state == "decoding" {
            bench.node.say(ask.ready(5));
            bench.node.say(ask.grown(vec![900]));
            bench.turn();
        }
        if state == "short of room" {
            (0..4).for_each(|_| {
                bench.turn();
            });
        }
        let sequence = bench.scheduler.sequences.values().next().expect("it runs");
        let reached = match sequence.state {
            State::Binding => "binding",
            State::Arriving => "arriving",
            State::Prefilling { .. } => "prefilling",
            State::Filling { .. } => unreachable!("all of it is computed in its place"),
            State::Decoding if sequence.room().is_short() => "short of room",
            State::Decoding => "decoding",
        };
        assert_eq!(reached, state);
        check(bench, ask, caller, state);
    }
}

#[test]
fn cancelling_in_any_state_gives_the_share_back_at_once() {
    in_each_state(|mut bench, ask, caller, state| {
        let steps = bench.model.batches().len();
        drop(caller);
        assert!(!bench.turn(), "{state}");
        if state == "binding" {
            assert!(bench.node.releases().is_empty(), "not before it is known to be bound");
            bench.node.say(ask.bound(0));
            assert!(!bench.turn());
        }
        assert_eq!(bench.node.releases(), [ask.share()], "{state}");
        assert_eq!(bench.model.batches().len(), steps, "{state}");
        assert!(bench.scheduler.is_empty() && bench.scheduler.runnable.is_empty(), "{state}");
        assert_eq!(bench.scheduler.shared.admission.requests(), 0, "{state}");
        assert_eq!(bench.scheduler.shared.admission.waiting_prompt_tokens(), 0, "{state}");
    });
}

#[test]
fn a_stop_in_any_state_ends_the_call_and_is_answered_by_a_release() {
    in_each_state(|mut bench, ask, mut caller, state| {
        let steps = bench.model.batches().len();
        bench.node.say(ask.stop());
        assert!(!bench.turn(), "{state}");
        assert_eq!(caller.heard().failed, Some(Code::Aborted), "{state}");
        assert_eq!(bench.node.releases(), [ask.share()], "{state}");
        assert_eq!(bench.model.batches().len(), steps, "{state}");
    });
}

#[test]
fn losing_the_node_in_any_state_ends_the_call() {
    in_each_state(|mut bench, _ask, mut caller, state| {
        bench.node.lose();
        bench.scheduler.fail_all("the engine lost its store node");
        assert_eq!(caller.heard().failed, Some(Code::Unavailable), "{state}");
        assert!(bench.scheduler.is_empty(), "{state}");
    });
}

#[test]
fn an_engine_that_never_sleeps_sees_that_its_node_is_gone() {
    let mut bench = bench(options());
    let ask = Ask::new(Leg::Whole, 1, 20, 40);
    let _caller = bench.ask(&ask);
    bench.node.say(ask.bound(0));
    bench.turn();
    bench.node.lose();
    assert_eq!(bench.scheduler.sweep(), Ok(()), "it does not look at every step");
    bench.now_us.store(1 + LOOK_EVERY_US, Ordering::Relaxed);
    assert!(bench.scheduler.sweep().is_err());
}

#[test]
fn a_share_is_released_once_whatever_crosses_the_release() {
    let mut bench = bench(options());
    let ask = Ask::new(Leg::Whole, 1, 64, 5);
    let caller = bench.ask(&ask);
    bench.node.say(ask.bound(0));
    bench.turn();
    drop(caller);
    bench.turn();
    for late in [ask.stop(), ask.grown(vec![3]), ask.ready(5)] {
        bench.node.say(late);
        bench.turn();
    }
    assert_eq!(bench.node.releases(), [ask.share()]);
}

#[test]
fn a_bind_that_nobody_waits_for_any_more_is_released_only_if_it_was_granted() {
    for (answer, releases) in [("granted", 1), ("gone", 0), ("stopped", 1)] {
        let mut bench = bench(options());
        let ask = Ask::new(Leg::Whole, 1, 64, 5);
        drop(bench.ask(&ask));
        bench.turn();
        assert_eq!(bench.ask(&ask).heard().failed, Some(Code::AlreadyExists), "{answer}");
        bench.node.say(match answer {
            "granted" => ask.bound(0),
            "gone" => ask.bound_to(Vec::new(), 0, v1::BindStatus::Gone),
            _ => ask.stop(),
        });
        bench.turn();
        bench.node.say(ask.stop());
        bench.turn();
        assert_eq!(bench.node.releases().len(), releases, "{answer}");
    }
}

#[test]
fn a_share_that_is_gone_or_taken_ends_the_call_and_is_not_released() {
    for status in [v1::BindStatus::Gone, v1::BindStatus::Taken, v1::BindStatus::Unspecified] {
        let mut bench = bench(options());
        let ask = Ask::new(Leg::Whole, 1, 64, 5);
        let mut caller = bench.ask(&ask);
        bench.node.say(ask.bound_to(Vec::new(), 0, status));
        bench.turn();
        assert_eq!(caller.heard().failed, Some(Code::Aborted), "{status:?}");
        assert!(bench.node.releases().is_empty(), "{status:?}");
    }
}

#[test]
fn slots_that_cannot_be_are_never_computed_into() {
    let check = |leg: Leg, slots: Vec<u32>, cached: u32| {
        let mut bench = bench(options());
        let ask = Ask::new(leg, 1, 100, 5);
        let mut caller = bench.ask(&ask);
        bench.node.say(ask.bound_to(slots, cached, v1::BindStatus::Ok));
        assert!(!bench.turn());
        assert_eq!(caller.heard().failed, Some(Code::Internal));
        assert_eq!(bench.node.releases(), [ask.share()]);
    };
    check(Leg::Whole, vec![1], 0);
    check(Leg::Whole, vec![1, 2, 3], 0);
    check(Leg::Whole, vec![1, FakeNode::SLOTS], 0);
    check(Leg::Whole, vec![1, 2], 100);
    check(Leg::Decode, vec![1, 2], 101);
}

#[test]
fn a_hand_over_that_cannot_be_read_ends_the_call() {
    for tail in [vec![], vec![0xFF], {
        let first = v1::TokenOut { id: VOCAB, logprob: None, top: Vec::new() };
        EngineTail::to_bytes(first)
    }] {
        let mut bench = bench(options());
        let ask = Ask::new(Leg::Decode, 1, 64, 5);
        let mut caller = bench.ask(&ask);
        bench.node.say(ask.bound(0));
        bench.node.say(ToEngine::Ready(v1::Ready { tx: Some(ask.share().tx.into()), tail }));
        bench.turn();
        assert_eq!(caller.heard().failed, Some(Code::Internal));
        assert_eq!(bench.node.releases(), [ask.share()]);
    }
}

#[test]
fn a_share_is_bound_by_one_call_only() {
    let mut bench = bench(options());
    let ask = Ask::new(Leg::Whole, 1, 64, 5);
    let mut first = bench.ask(&ask);
    let mut second = bench.ask(&ask);
    assert_eq!(second.heard().failed, Some(Code::AlreadyExists));
    drop(second);
    bench.node.state().grows_from = Some(500);
    bench.node.say(ask.bound(0));
    bench.run();
    assert_eq!(first.heard().tokens, greedy(&ask.prompt(), 5));
}

#[test]
fn without_room_the_youngest_is_given_up_in_time_and_the_others_go_on() {
    let mut bench = bench(options());
    let asks = [Ask::new(Leg::Whole, 1, 64, 30), Ask::new(Leg::Whole, 2, 64, 30)];
    let mut callers: Vec<Caller> = asks.iter().map(|ask| bench.ask(ask)).collect();
    for ask in &asks {
        bench.node.say(ask.bound(0));
    }
    bench.run();
    for ask in &asks {
        bench.node.say(ask.grown(Vec::new()));
    }
    bench.run();
    assert!(!bench.scheduler.is_empty());
    bench.now_us.store(1_000_002, Ordering::Relaxed);
    bench.turn();
    assert_eq!(callers[1].heard().failed, Some(Code::ResourceExhausted));
    assert_eq!(bench.node.releases(), [asks[1].share()]);
    let grows = |bench: &Bench| {
        let messages = bench.node.messages();
        messages.iter().filter(|message| matches!(message, Message::Grow(_))).count()
    };
    assert_eq!(grows(&bench), 3, "asked again after a pause");
    bench.node.say(asks[0].grown(vec![900]));
    bench.run();
    assert_eq!(callers[0].heard().tokens, greedy(&asks[0].prompt(), 30));
    assert!(bench.scheduler.is_empty());
}

#[test]
fn a_node_that_never_answers_a_grow_does_not_hang_the_call() {
    let mut bench = bench(options());
    let ask = Ask::new(Leg::Whole, 1, 64, 30);
    let mut caller = bench.ask(&ask);
    bench.node.say(ask.bound(0));
    bench.run();
    bench.now_us.store(1_000_002, Ordering::Relaxed);
    bench.turn();
    assert_eq!(caller.heard().failed, Some(Code::ResourceExhausted));
}

#[test]
fn leases_are_renewed_four_times_a_second_from_the_hand_over_on() {
    let mut bench = bench(SchedulerOptions { prefill_chunk_tokens: 16, ..options() });
    bench.node.state().grows_from = Some(500);
    let (decode, whole) = (Ask::new(Leg::Decode, 1, 60, 50), Ask::new(Leg::Whole, 2, 60, 50));
    bench.model.fill(&decode.prompt(), &decode.slots());
    let _callers = [bench.ask(&decode), bench.ask(&whole)];
    bench.node.say(decode.bound(0));
    bench.node.say(whole.bound(0));
    let alive = |bench: &mut Bench, quarters: u64| -> Vec<Vec<Share>> {
        bench.node.state().heard.clear();
        bench.now_us.store(quarters * 250_000, Ordering::Relaxed);
        bench.turn();
        let shares = |message| match message {
            Message::KeepAlive(alive) => Some(
                alive
                    .shares
                    .into_iter()
                    .map(|share| Share::from_wire(share.tx, share.side).expect("a share"))
                    .collect(),
            ),
            _ => None,
        };
        bench.node.messages().into_iter().filter_map(shares).collect()
    };
    assert!(alive(&mut bench, 1).is_empty());
    bench.node.say(decode.ready(5));
    assert_eq!(alive(&mut bench, 2), [[decode.share()]]);
    assert!(alive(&mut bench, 2).is_empty(), "once in a quarter");
    (0..3).for_each(|_| {
        bench.turn();
    });
    assert_eq!(alive(&mut bench, 3), [[decode.share(), whole.share()]]);
}

#[test]
fn an_answer_ends_at_a_stop_token_and_says_nothing_of_it() {
    let mut bench = bench(options());
    let mut ask = Ask::new(Leg::Whole, 1, 20, 40);
    let expected = greedy(&ask.prompt(), 40);
    let stop = expected[6];
    let end = expected.iter().position(|&token| token == stop).expect("it is there") + 1;
    ask.answer.stop_tokens.insert(stop);
    let mut caller = bench.ask(&ask);
    bench.node.say(ask.bound(0));
    bench.run();
    let answered = caller.heard();
    assert_eq!(answered.tokens, expected[..end]);
    assert_eq!(answered.text, text_of(&expected[..end - 1]));
    assert_eq!(answered.reason(), Reason::Stop);
    assert_eq!(answered.finished.expect("finished").generated_tokens as usize, end);
}

#[test]
fn an_answer_ends_at_a_stop_string_across_tokens() {
    let mut bench = bench(options());
    let mut ask = Ask::new(Leg::Whole, 1, 20, 40);
    let text = text_of(&greedy(&ask.prompt(), 40));
    let stop = &text[10..13];
    ask.answer.text.stop.strings = vec![stop.to_owned()];
    let mut caller = bench.ask(&ask);
    bench.node.say(ask.bound(0));
    bench.run();
    let answered = caller.heard();
    let start = text.find(stop).expect("it is there");
    assert_eq!(answered.text, text[..start]);
    assert_eq!(answered.tokens.len(), start + 3);
    assert_eq!(answered.reason(), Reason::Stop);
    assert_eq!(answered.finished.expect("finished").stop_matched, stop);
}

#[test]
fn a_seeded_answer_does_not_depend_on_who_else_runs_nor_on_where_it_was_prefilled() {
    let warm = |leg: Leg| {
        let mut ask = Ask::new(leg, 1, 40, 30);
        ask.answer.sampling.temperature = 1.0;
        ask.answer.sampling.seed = 77;
        ask
    };
    let whole = warm(Leg::Whole);
    let answer = |others: u64| {
        let mut bench = bench(options());
        bench.node.state().grows_from = Some(500);
        let _others: Vec<Caller> = (2..2 + others)
            .map(|serial| {
                let other = Ask::new(Leg::Whole, serial, 50, 9);
                bench.node.say(other.bound(0));
                bench.ask(&other)
            })
            .collect();
        let mut caller = bench.ask(&whole);
        bench.node.say(whole.bound(0));
        bench.run();
        caller.heard().tokens
    };
    let alone = answer(0);
    assert_ne!(alone, greedy(&whole.prompt(), 30));
    assert_eq!(answer(5), alone);

    let prefill = warm(Leg::Prefill);
    let mut first = bench(options());
    let _caller = first.ask(&prefill);
    first.node.say(prefill.bound(0));
    first.run();
    let decode = warm(Leg::Decode);
    let mut second = bench(options());
    second.node.state().grows_from = Some(500);
    second.model.fill(&decode.prompt(), &decode.slots());
    let mut caller = second.ask(&decode);
    second.node.say(decode.bound(0));
    second.node.say(decode.ready(first.tail()));
    second.run();
    assert_eq!(caller.heard().tokens, alone);
}

#[test]
fn log_probabilities_come_with_the_token_s_own_bytes() {
    let mut bench = bench(options());
    let mut ask = Ask::new(Leg::Whole, 1, 20, 2);
    ask.answer.logprobs = Some(3);
    let mut caller = bench.ask(&ask);
    bench.node.say(ask.bound(0));
    bench.run();
    let mut tokens = Vec::new();
    while let Ok(event) = caller.events.try_recv() {
        if let Some(Event::Tokens(out)) = event.expect("no error").event {
            tokens.extend(out.tokens);
        }
    }
    assert_eq!(tokens.len(), 2);
    for token in tokens {
        let logprob = token.logprob.expect("asked for");
        assert_eq!(logprob.id, token.id);
        assert_eq!(logprob.bytes, text_of(&[token.id]).into_bytes());
        assert!(logprob.logprob < 0.0);
        assert_eq!(token.top.len(), 3);
        assert_eq!(token.top[0], logprob, "greedy takes the likeliest");
    }
}

#[test]
fn the_load_says_who_runs_who_waits_and_what_is_left_to_compute() {
    let mut bench = bench(SchedulerOptions { running_requests_max: 1, ..options() });
    let asks = [Ask::new(Leg::Whole, 1, 150, 30), Ask::new(Leg::Prefill, 2, 70, 1)];
    let _callers: Vec<Caller> = asks.iter().map(|ask| bench.ask(ask)).collect();
    bench.scheduler.publish_load();
    let load = |running_requests,
                waiting_requests,
                waiting_prompt_tokens,
                computed_prompt_tokens| v1::InstanceLoad {
        running_requests,
        waiting_requests,
        waiting_prompt_tokens,
        computed_prompt_tokens,
    };
    assert_eq!(bench.node.state().load, load(0, 2, 220, 0));
    bench.model.fill(&asks[0].prompt()[..64], &asks[0].slots());
    bench.node.say(asks[0].bound(64));
    bench.node.say(asks[1].bound(0));
    bench.turn();
    bench.turn();
    assert_eq!(bench.node.state().load, load(1, 1, 70, 86));
}
