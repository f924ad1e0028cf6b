//! What put-with-signal costs, in the NIC model of `kvasir_transfer_core::signal::nic`: 96 transfers
//! over 8 peers, every throughput relative to the same puts without signals. Virtual time; the same
//! output everywhere. Prints Markdown.
//!
//! `cargo run -p kvasir-transfer --example put_with_signal`

#![allow(clippy::print_stdout)] // a program that prints its findings

use std::num::{NonZeroU32, NonZeroUsize};

use kvasir_transfer_core::signal::nic::{NicModel, Run};
use kvasir_transfer_core::signal::{
    Group, Mode, Options, OrderedBy, Ordering, Peer, Plan, SignalWord, TooMany, Transfer, plan,
    plan_puts_only,
};

const PEERS: u32 = 8;
const TRANSFERS: u32 = 96;
const QUEUE_PAIRS: u32 = 8;
const KIB: u64 = 1 << 10;
const PER_DESTINATION: Mode = Mode::Decoupled { group: Group::PerDestination };

/// In which order the caller names its transfers.
#[derive(Clone, Copy)]
enum Named {
    PeerAfterPeer,
    PeersInTurn,
}

struct Case {
    model: NicModel,
    named: Named,
    bytes: u64,
    queue_pairs: u32,
}

impl Case {
    fn new(bytes: u64) -> Case {
        let model = NicModel::default();
        Case { model, named: Named::PeerAfterPeer, bytes, queue_pairs: QUEUE_PAIRS }
    }

    fn transfers(&self) -> Vec<Transfer> {
        let peer = |at| match self.named {
            Named::PeerAfterPeer => at / (TRANSFERS / PEERS),
            Named::PeersInTurn => at % PEERS,
        };
        let transfer = |at| Transfer {
            peer: Peer(peer(at)),
            bytes: self.bytes,
            signal: SignalWord(u64::from(at)),
        };
        (0..TRANSFERS).map(transfer).collect()
    }

    fn queue_pairs(&self) -> NonZeroU32 {
        NonZeroU32::new(self.queue_pairs).unwrap_or(NonZeroU32::MIN)
    }

    fn puts(&self) -> Result<Plan, TooMany> {
        plan_puts_only(&self.transfers(), self.queue_pairs())
    }

    fn run(&self, mode: Mode, ordered_by: OrderedBy) -> Result<Run, TooMany> {
        let queue_pairs = self.queue_pairs();
        let options = Options { mode, ordered_by, ordering: self.model.ordering, queue_pairs };
        Ok(self.model.run(plan(&self.transfers(), options)?.plan()))
    }

    /// Throughput as a share of the puts alone, in percent.
    fn percent(&self, mode: Mode, ordered_by: OrderedBy) -> Result<f64, TooMany> {
        let puts_ps = self.model.run(&self.puts()?).finished_ps();
        Ok(100.0 * puts_ps as f64 / self.run(mode, ordered_by)?.finished_ps() as f64)
    }
}

fn main() -> Result<(), TooMany> {
    sizes()?;
    group_sizes()?;
    queue_pairs()?;
    sensitivity()
}

fn sizes() -> Result<(), TooMany> {
    println!("### Sizes\n");
    println!(
        "| bytes | puts alone us | coupled, host | coupled, nic | decoupled, host | decoupled, nic | the same where the fence waits for reads only |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for bytes in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].map(|kib| kib * KIB) {
        let case = Case::new(bytes);
        let mut rc = Case::new(bytes);
        rc.model.ordering = Ordering::RcQueuePair;
        println!(
            "| {} Ki | {:.1} | {:.1} % | {:.1} % | {:.1} % | {:.1} % | {:.1} % |",
            bytes / KIB,
            us(case.model.run(&case.puts()?).finished_ps()),
            case.percent(Mode::Coupled, OrderedBy::Host)?,
            case.percent(Mode::Coupled, OrderedBy::Nic)?,
            case.percent(PER_DESTINATION, OrderedBy::Host)?,
            case.percent(PER_DESTINATION, OrderedBy::Nic)?,
            rc.percent(PER_DESTINATION, OrderedBy::Nic)?,
        );
    }
    Ok(())
}

fn group_sizes() -> Result<(), TooMany> {
    println!("\n### Group size, 4 KiB\n");
    println!(
        "| transfers in a group | nic | told after us, mean | host | nic, peers named in turn |"
    );
    println!("| --- | --- | --- | --- | --- |");
    let sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96].into_iter();
    let sizes = sizes.filter_map(NonZeroUsize::new).map(Group::Size);
    for group in sizes.chain([Group::PerDestination]) {
        let case = Case::new(4 * KIB);
        let in_turn = Case { named: Named::PeersInTurn, ..Case::new(4 * KIB) };
        let mode = Mode::Decoupled { group };
        let told_ps = case.run(mode, OrderedBy::Nic)?.mean_signal_ps().unwrap_or(0);
        println!(
            "| {} | {:.1} % | {:.1} | {:.1} % | {:.1} % |",
            name(group),
            case.percent(mode, OrderedBy::Nic)?,
            us(told_ps),
            case.percent(mode, OrderedBy::Host)?,
            in_turn.percent(mode, OrderedBy::Nic)?,
        );
    }
    Ok(())
}

fn queue_pairs() -> Result<(), TooMany> {
    println!("\n### Queue pairs, 4 KiB, one group per destination\n");
    println!("| queue pairs | nic |");
    println!("| --- | --- |");
    for queue_pairs in [1, 2, 4, 8, 16] {
        let case = Case { queue_pairs, ..Case::new(4 * KIB) };
        println!("| {queue_pairs} | {:.1} % |", case.percent(PER_DESTINATION, OrderedBy::Nic)?);
    }
    Ok(())
}

fn sensitivity() -> Result<(), TooMany> {
    println!("\n### Sensitivity\n");
    println!(
        "| round trip us | cost of a request | Gb/s | coupled, 4 KiB | decoupled host, 4 KiB | decoupled nic, 4 KiB | decoupled nic, 64 KiB |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for round_trip_us in [2, 5, 10, 20] {
        for percent in [50, 100, 200] {
            for wire_gbps in [100, 200, 400] {
                let mut small = Case::new(4 * KIB);
                small.model = varied(round_trip_us, percent, wire_gbps);
                let large = Case { model: small.model, ..Case::new(64 * KIB) };
                println!(
                    "| {round_trip_us} | x {} | {wire_gbps} | {:.1} % | {:.1} % | {:.1} % | {:.1} % |",
                    percent as f64 / 100.0,
                    small.percent(Mode::Coupled, OrderedBy::Host)?,
                    small.percent(PER_DESTINATION, OrderedBy::Host)?,
                    small.percent(PER_DESTINATION, OrderedBy::Nic)?,
                    large.percent(PER_DESTINATION, OrderedBy::Nic)?,
                );
            }
        }
    }
    Ok(())
}

fn varied(round_trip_us: u64, percent: u64, wire_gbps: u64) -> NicModel {
    let base = NicModel::default();
    NicModel {
        round_trip_ns: round_trip_us * 1_000,
        wire_gbps,
        post_ns: base.post_ns * percent / 100,
        doorbell_ns: base.doorbell_ns * percent / 100,
        nic_request_ns: base.nic_request_ns * percent / 100,
        ..base
    }
}

fn name(group: Group) -> String {
    match group {
        Group::Size(size) => size.to_string(),
        Group::PerDestination => "one per destination".to_owned(),
        Group::All => "all".to_owned(),
    }
}

fn us(ps: u64) -> f64 {
    ps as f64 / 1e6
}
