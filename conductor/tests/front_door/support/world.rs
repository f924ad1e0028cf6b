//! What happened, in order, on all nodes and engines.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvasir_proto::{Side, v1};

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Happened {
    Allocate {
        node: &'static str,
        tx: u64,
        request: v1::TxAllocateRequest,
    },
    Push {
        node: &'static str,
        tx: u64,
        side: Side,
    },
    Commit {
        node: &'static str,
        tx: u64,
        valid_blocks: u32,
        source_lost: bool,
    },
    Abort {
        node: &'static str,
        tx: u64,
        side: Side,
    },
    Renew {
        node: &'static str,
        tx: u64,
        side: Side,
    },
    /// A renewal came when the lease was over.
    RanOut {
        node: &'static str,
        tx: u64,
        side: Side,
    },
    Replicate {
        node: &'static str,
        request: v1::ReplicateRequest,
    },
    Keep {
        node: &'static str,
        request: v1::PersistContextRequest,
    },
    Drop {
        node: &'static str,
        request: v1::DeleteContextRequest,
    },
    Generate {
        node: &'static str,
        tx: u64,
        leg: v1::Phase,
        request: v1::GenerateRequest,
        traceparent: Option<String>,
    },
    /// The call was given up by its caller, or its end was taken.
    GenerateOver {
        node: &'static str,
        tx: u64,
        leg: v1::Phase,
        finished: bool,
    },
}

#[derive(Debug, Clone, Default)]
pub(crate) struct World {
    log: Arc<Mutex<Vec<Happened>>>,
    handed_over: Arc<Mutex<BTreeSet<u64>>>,
}

impl World {
    pub(crate) fn note(&self, happened: Happened) {
        self.log.lock().expect("no panic").push(happened);
    }

    pub(crate) fn log(&self) -> Vec<Happened> {
        self.log.lock().expect("no panic").clone()
    }

    pub(crate) fn count(&self, which: impl Fn(&Happened) -> bool) -> usize {
        self.log().iter().filter(|happened| which(happened)).count()
    }

    /// The prefill side of a transaction has sent all to the decode side.
    pub(crate) fn hand_over(&self, tx: u64) {
        self.handed_over.lock().expect("no panic").insert(tx);
    }

    pub(crate) async fn handed_over(&self, tx: u64) {
        while !self.handed_over.lock().expect("no panic").contains(&tx) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Waits until it has happened; fails with the log when it does not.
    pub(crate) async fn until(&self, what: &str, done: impl Fn(&[Happened]) -> bool) {
        for _ in 0..2_000 {
            if done(&self.log()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("never happened: {what}; what did:\n{:#?}", self.log());
    }

    /// Waits until each share that was ever asked for has been aborted.
    pub(crate) async fn until_all_shares_are_aborted(&self) {
        self.until("an abort of each share", |log| {
            let asked = shares_asked(log);
            !asked.is_empty() && asked == shares_aborted(log)
        })
        .await;
    }
}

type Shares = BTreeSet<(&'static str, u64, Side)>;

pub(crate) fn shares_asked(log: &[Happened]) -> Shares {
    let share = |happened: &Happened| match happened {
        Happened::Allocate { node, tx, request } => {
            Some((*node, *tx, Side::from_wire(request.side).expect("a side")))
        }
        _ => None,
    };
    log.iter().filter_map(share).collect()
}

pub(crate) fn shares_aborted(log: &[Happened]) -> Shares {
    let share = |happened: &Happened| match happened {
        Happened::Abort { node, tx, side } => Some((*node, *tx, *side)),
        _ => None,
    };
    log.iter().filter_map(share).collect()
}
