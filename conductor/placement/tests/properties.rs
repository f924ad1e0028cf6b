//! What must hold of every decision, over random clusters.

use crate::support::World;
use kvasir_placement::{Objectives, PlaceRequest, Placement, Refusal};
use proptest::prelude::*;

#[derive(Debug, Clone, Copy)]
struct Member {
    role: u8,
    held: u32,
    waiting_tokens: u64,
    running: u32,
    slots: u32,
}

fn member() -> impl Strategy<Value = Member> {
    (0u8..3, 0u32..20, 0u64..50_000, 0u32..14, prop_oneof![3 => Just(500u32), 1 => 10u32..30])
        .prop_map(|(role, held, waiting_tokens, running, slots)| Member {
            role,
            held,
            waiting_tokens,
            running,
            slots,
        })
}

fn world(members: &[Member]) -> World {
    let names: Vec<String> = members
        .iter()
        .enumerate()
        .map(|(at, member)| format!("{}{at:02}", ["p", "d", "b"][usize::from(member.role)]))
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let held: Vec<(u16, u32)> =
        members.iter().enumerate().map(|(at, member)| (at as u16, member.held)).collect();
    let mut world = World::new(&names).held(&held);
    for (name, member) in names.iter().zip(members) {
        world = world.reports(name, |report| {
            report.load.waiting_prompt_tokens = member.waiting_tokens;
            report.load.running = member.running;
            report.slots_available = member.slots;
        });
    }
    world
}

fn place(members: &[Member], seed: u64, ttft_us: u64) -> Result<Placement, Refusal> {
    world(members).place(|request: &mut PlaceRequest<'_>| {
        request.tie_seed = seed;
        request.objectives = Objectives { ttft_us, tbt_us: 1_900 };
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_same_view_and_seed_give_the_same_decision(
        members in prop::collection::vec(member(), 0..10), seed: u64, ttft_us in 0u64..500_000,
    ) {
        prop_assert_eq!(place(&members, seed, ttft_us), place(&members, seed, ttft_us));
    }

    #[test]
    fn a_decision_keeps_its_promises(
        members in prop::collection::vec(member(), 0..10), seed: u64, ttft_us in 0u64..500_000,
    ) {
        let Ok(placement) = place(&members, seed, ttft_us) else { return Ok(()) };
        let promised =
            placement.predicted_ttft_us <= ttft_us && placement.predicted_tbt_us <= 1_900;
        prop_assert_ne!(promised, placement.probe);
        if placement.probe {
            prop_assert_eq!((placement.queue_us, placement.decode_wait_us), (0, 0));
        }
        prop_assert_eq!(
            placement.queue_us.max(placement.transfer_us) + placement.compute_us
                + placement.decode_wait_us,
            placement.predicted_ttft_us
        );
        prop_assert_eq!(placement.compute_tokens + placement.reused_tokens, 1_000);
        prop_assert!(placement.compute_tokens >= 1);
        let at = |chosen: &kvasir_placement::Chosen| &members[usize::from(chosen.node.0)];
        let (prefill, decode) = (at(placement.prefill()), at(placement.decode()));
        prop_assert!(prefill.role != 1 && decode.role != 0);
        prop_assert_eq!(placement.is_whole(), prefill.role == 2);
        if let Some(fetch) = &placement.fetch {
            prop_assert_eq!(fetch.from_block, placement.prefill().cached_blocks);
            prop_assert!(fetch.until_block > fetch.from_block);
            prop_assert!(fetch.until_block <= at(&fetch.source).held);
            prop_assert!(fetch.source.node != placement.prefill().node);
            prop_assert_eq!(fetch.until_block * 64, placement.reused_tokens);
        }
        let chosen = placement.considered.prefill_candidates.iter().map(|candidate| candidate.verdict)
            .filter(|verdict| *verdict == kvasir_placement::Verdict::Chosen);
        prop_assert_eq!(chosen.count(), 1);
        prop_assert!(!placement.to_string().is_empty());
    }

    #[test]
    fn more_prefill_work_anywhere_never_promises_an_earlier_token(
        members in prop::collection::vec(member(), 1..8), which: prop::sample::Index, seed: u64,
    ) {
        // Without decodes: those end while a longer queue is worked off.
        let members: Vec<Member> =
            members.into_iter().map(|member| Member { running: 0, ..member }).collect();
        let mut busier = members.clone();
        busier[which.index(members.len())].waiting_tokens += 10_000;
        match (place(&members, seed, u64::MAX), place(&busier, seed, u64::MAX)) {
            (Ok(before), Ok(after)) => {
                prop_assert!(after.predicted_ttft_us >= before.predicted_ttft_us);
            }
            (before, after) => prop_assert_eq!(before.is_err(), after.is_err()),
        }
    }

    #[test]
    fn a_longer_prefix_never_makes_a_lone_instance_dearer(
        member in member(), more in 1u32..10, seed: u64,
    ) {
        let lone = Member { role: 2, slots: 500, ..member };
        let longer = Member { role: 2, slots: 500, held: lone.held + more, ..member };
        if let (Ok(before), Ok(after)) = (place(&[lone], seed, u64::MAX), place(&[longer], seed, u64::MAX)) {
            prop_assert!(after.compute_us <= before.compute_us);
        }
    }

    #[test]
    fn a_stricter_objective_only_ever_refuses(
        members in prop::collection::vec(member(), 1..8), seed: u64, ttft_us in 0u64..300_000,
    ) {
        match (place(&members, seed, ttft_us), place(&members, seed, u64::MAX)) {
            (Ok(strict), loose) => {
                let loose = loose.expect("the looser one is placed too");
                if !strict.probe {
                    prop_assert_eq!(strict.predicted_ttft_us, loose.predicted_ttft_us);
                }
            }
            (Err(_), _) => {}
        }
    }
}
