//! Groups of peers: scatters, barriers, and what a lost member means for the others.

use std::time::Duration;

use kvasir_transfer::scatter::{Barrier, GroupMember, PeerGroup, Scatter, ScatterSlice};
use kvasir_transfer::{Completion, Refusal, RegionHandle, SubmitError, WriteError};

use crate::fabric::{Fabric, LONG, Node, fill, read};

const MEMBERS: usize = 5;

/// One engine writes to a group of others, each with a region of its own.
struct Crowd {
    nodes: Vec<Node>,
    targets: Vec<RegionHandle>,
    peers: PeerGroup,
    source: RegionHandle,
    bytes: Vec<u8>,
}

fn crowd(fabric: &Fabric) -> Crowd {
    let (source, _) = fabric.a.region(64 << 10);
    let bytes = fill(&source, 3);
    let nodes: Vec<Node> = (0..MEMBERS).map(|_| fabric.node()).collect();
    let mut targets = Vec::new();
    let mut members = Vec::new();
    for node in &nodes {
        let (handle, target) = node.region(16 << 10);
        targets.push(handle);
        members.push(GroupMember { peer: fabric.a.connect(node), target });
    }
    let peers = fabric.a.group(members);
    assert_eq!(peers.members().len(), MEMBERS);
    Crowd { nodes, targets, peers, source, bytes }
}

impl Crowd {
    fn scatter(&self, slices: Vec<ScatterSlice>) -> Scatter {
        let (peers, source) = (self.peers.clone(), self.source.clone());
        Scatter { peers, source, slices, group: 1, deadline: LONG }
    }

    fn barrier(&self, imm: u32) -> Barrier {
        Barrier { peers: self.peers.clone(), imm, group: 1, deadline: LONG }
    }
}

/// A different slice for each.
fn slice(member: usize, imm: u32) -> ScatterSlice {
    let (at, bytes) = (member as u64, 1000 + member as u64);
    ScatterSlice {
        member,
        source_offset: at * 2000 + 1,
        target_offset: at * 100,
        bytes,
        imm: Some(imm),
    }
}

pub(crate) fn a_scatter_gives_each_member_its_slice(fabric: &Fabric) {
    let crowd = crowd(fabric);
    let reached: Vec<_> = crowd.nodes.iter().map(|node| node.expect(7, 1)).collect();
    let slices = (0..MEMBERS).map(|member| slice(member, 7)).collect();
    let (done, outcomes) = fabric.a.scatter(crowd.scatter(slices));
    assert_eq!(fabric.outcome(&done), Ok(()));
    for (member, reached) in reached.iter().enumerate() {
        assert_eq!(fabric.outcome(reached), Ok(()), "one count at member {member}");
        assert_eq!(outcomes.get(member), Some(Ok(())));
        let (from, to, bytes) = (member * 2000 + 1, member * 100, 1000 + member);
        assert_eq!(read(&crowd.targets[member], to, bytes), crowd.bytes[from..from + bytes]);
        assert_eq!(read(&crowd.targets[member], 0, to), vec![0; to], "nothing before it");
        assert_eq!(read(&crowd.targets[member], to + bytes, 100), [0; 100], "nothing behind it");
    }
}

pub(crate) fn a_scatter_may_name_some_members_often_and_others_never(fabric: &Fabric) {
    let crowd = crowd(fabric);
    // Each with an immediate of its own.
    let slices =
        vec![slice(1, 10), ScatterSlice { target_offset: 5000, ..slice(1, 11) }, slice(4, 12)];
    let counts = [(1, 10), (1, 11), (4, 12)].map(|(node, imm)| crowd.nodes[node].expect(imm, 1));
    let never = crowd.nodes[0].expect(10, 1);
    let (done, outcomes) = fabric.a.scatter(crowd.scatter(slices));
    assert_eq!(fabric.outcome(&done), Ok(()));
    assert_eq!(outcomes.len(), 3);
    for reached in counts {
        assert_eq!(fabric.outcome(&reached), Ok(()));
    }
    fabric.pass(Duration::from_millis(2));
    assert_eq!(never.get(), None);
    let (done, outcomes) = fabric.a.scatter(crowd.scatter(Vec::new()));
    assert_eq!(fabric.outcome(&done), Ok(()), "nothing to do is done");
    assert!(outcomes.is_empty());
}

pub(crate) fn a_long_slice_of_a_scatter_is_one_count(fabric: &Fabric) {
    let crowd = crowd(fabric);
    let reached = crowd.nodes[2].expect(7, 2);
    let long = ScatterSlice { bytes: 15_000, target_offset: 0, ..slice(2, 7) };
    let (done, _) = fabric.a.scatter(crowd.scatter(vec![long, slice(3, 7)]));
    assert_eq!(fabric.outcome(&done), Ok(()));
    assert_eq!(read(&crowd.targets[2], 0, 15_000), crowd.bytes[4001..19_001]);
    fabric.pass(Duration::from_millis(2));
    assert_eq!(reached.get(), None, "one of two: its slices are not counted");
}

pub(crate) fn a_barrier_is_counted_at_every_member_and_moves_nothing(fabric: &Fabric) {
    let crowd = crowd(fabric);
    let reached: Vec<_> = crowd.nodes.iter().map(|node| node.expect(9, 2)).collect();
    for round in 0..2 {
        let (done, outcomes) = fabric.a.barrier(&crowd.barrier(9));
        assert_eq!(fabric.outcome(&done), Ok(()));
        assert!((0..MEMBERS).all(|member| outcomes.get(member) == Some(Ok(()))));
        if round == 0 {
            assert!(reached.iter().all(|reached| reached.get().is_none()), "one of two");
        }
    }
    for (reached, target) in reached.iter().zip(&crowd.targets) {
        assert_eq!(fabric.outcome(reached), Ok(()));
        assert!(read(target, 0, 16 << 10).iter().all(|byte| *byte == 0));
    }
}

pub(crate) fn everybody_passes_a_barrier_that_everybody_has_reached(fabric: &Fabric) {
    // Each of three engines tells the two others, and waits for both.
    let nodes: Vec<Node> = (0..3).map(|_| fabric.node()).collect();
    let regions: Vec<_> = nodes.iter().map(|node| node.region(64)).collect();
    let groups: Vec<PeerGroup> = (0..3usize)
        .map(|own| {
            let others = (0..3).filter(|other| *other != own);
            let member = |other: usize| GroupMember {
                peer: nodes[own].connect(&nodes[other]),
                target: regions[other].1,
            };
            nodes[own].group(others.map(member).collect())
        })
        .collect();
    for round in 0..5 {
        let passed: Vec<_> = nodes.iter().map(|node| node.expect(round, 2)).collect();
        for (node, peers) in nodes.iter().zip(&groups) {
            // Both wait for the third one at least, which is the last to come.
            assert!(passed[..2].iter().all(|passed| passed.get().is_none()), "one is missing");
            let barrier = Barrier { peers: peers.clone(), imm: round, group: 0, deadline: LONG };
            let (done, _) = node.barrier(&barrier);
            assert_eq!(fabric.outcome(&done), Ok(()));
        }
        for passed in &passed {
            assert_eq!(fabric.outcome(passed), Ok(()));
        }
    }
}

pub(crate) fn a_lost_member_fails_its_own_part_only(fabric: &Fabric) {
    let crowd = crowd(fabric);
    let (done, _) = fabric.a.barrier(&crowd.barrier(5));
    assert_eq!(fabric.outcome(&done), Ok(()));
    fabric.kill(&crowd.nodes[2]);
    let slices = |imm| (0..MEMBERS).map(|member| slice(member, imm)).collect();
    for imm in [7, 8] {
        let reached: Vec<_> =
            [0, 1, 3, 4].iter().map(|node: &usize| crowd.nodes[*node].expect(imm, 1)).collect();
        let (done, outcomes) = fabric.a.scatter(crowd.scatter(slices(imm)));
        assert_eq!(fabric.outcome(&done), Err(WriteError::PeerGone));
        assert_eq!(outcomes.failed().collect::<Vec<_>>(), [(2, WriteError::PeerGone)]);
        for reached in &reached {
            assert_eq!(fabric.outcome(reached), Ok(()), "the others have theirs");
        }
    }
}

pub(crate) fn a_refused_slice_fails_its_own_part_only(fabric: &Fabric) {
    let crowd = crowd(fabric);
    assert_eq!(fabric.outcome(&crowd.nodes[3].revoke(&crowd.targets[3])), Ok(()));
    let outside = ScatterSlice { target_offset: 16 << 10, ..slice(0, 7) };
    let slices = vec![slice(1, 7), outside, slice(3, 7), slice(4, 7)];
    let (done, outcomes) = fabric.a.scatter(crowd.scatter(slices));
    assert!(matches!(fabric.outcome(&done), Err(WriteError::Refused(_))));
    let refused = |refusal| Some(Err(WriteError::Refused(refusal)));
    assert_eq!(outcomes.get(0), Some(Ok(())));
    assert_eq!(outcomes.get(1), refused(Refusal::OutOfBounds));
    assert_eq!(outcomes.get(2), refused(Refusal::Revoked));
    assert_eq!(outcomes.get(3), Some(Ok(())));
}

pub(crate) fn a_scatter_that_cannot_be_sent_is_not_accepted(fabric: &Fabric) {
    let crowd = crowd(fabric);
    let submit = |scatter| fabric.a.try_scatter(scatter, Completion::Ignore).err();
    let nobody = crowd.scatter(vec![slice(0, 7), slice(MEMBERS, 7)]);
    assert!(matches!(submit(nobody), Some(SubmitError::Invalid(_))));
    let beyond = ScatterSlice { source_offset: (64 << 10) - 10, ..slice(0, 7) };
    assert!(matches!(submit(crowd.scatter(vec![beyond])), Some(SubmitError::Invalid(_))));
    let many = vec![slice(0, 7); 100];
    assert!(matches!(submit(crowd.scatter(many)), Some(SubmitError::Invalid(_))), "of 64");
    let foreign = crowd.nodes[0].try_scatter(crowd.scatter(vec![slice(0, 7)]), Completion::Ignore);
    assert!(matches!(foreign, Err(SubmitError::Invalid(_))), "the group is another engine's");
    fabric.pass(Duration::from_millis(2));
    assert_eq!(read(&crowd.targets[0], 0, 16 << 10), vec![0; 16 << 10], "nothing was sent");
}

pub(crate) fn a_scatter_is_drained_with_its_group(fabric: &Fabric) {
    let crowd = crowd(fabric);
    // 290 ms of bytes at the throttle's rate.
    let whole = |member| ScatterSlice { bytes: 15_000, ..slice(member, 7) };
    let slices = (0..20).map(|at| whole(at % MEMBERS)).collect();
    let (done, outcomes) = fabric.a.scatter(crowd.scatter(slices));
    fabric.until("the first slice", || outcomes.get(0).is_some());
    let (drained, flag) = Completion::flag();
    fabric.a.drain_group_then(1, drained);
    assert_eq!(fabric.outcome(&flag), Ok(()));
    assert_eq!(fabric.outcome(&done), Err(WriteError::Cancelled));
    let all: Vec<_> = (0..20).map(|part| outcomes.get(part).expect("each is definite")).collect();
    assert!(all.contains(&Ok(())) && all.contains(&Err(WriteError::Cancelled)), "{all:?}");
}
