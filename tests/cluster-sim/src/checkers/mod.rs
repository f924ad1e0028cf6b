//! What must never happen, each in a module of its own with books of its own. A checker sees what an
//! observer outside sees ([`Seen`]) and what is true of the prompts ([`Truth`]); it never looks into a
//! node.

mod answers;
mod bytes;
mod chains;
mod drains;
mod durability;
mod generations;
mod leases;
mod namespaces;
mod objects;
mod reads;
mod reuse;
mod transactions;
mod unwritten;
mod versions;
mod writers;

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;
use std::rc::Rc;

use kvasir_proto::BlockKey;
pub use unwritten::UNWRITTEN;

use crate::content::Truth;
use crate::plan::Plan;
use crate::seen::Seen;

/// Observations that are kept to be printed with a violation.
const TRACE_MAX: usize = 4_000;

/// One invariant.
pub trait Checker: Debug {
    /// As DESIGN §7 numbers it, and in a word.
    fn name(&self) -> &'static str;

    /// # Errors
    /// A sentence about what must not happen and did.
    fn see(&mut self, now_us: u64, seen: &Seen) -> Result<(), String>;
}

/// What must not happen, and did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub checker: &'static str,
    pub at_us: u64,
    pub what: String,
}

/// All checkers, and what they saw last.
#[derive(Debug)]
pub struct Books {
    checkers: Vec<Box<dyn Checker>>,
    durability: durability::Durability,
    covered: BTreeMap<&'static str, u64>,
    violation: Option<Violation>,
    trace: VecDeque<(u64, Seen)>,
    pub seen_total: u64,
    tally: Tally,
}

/// How often something was seen.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally {
    pub answered: u64,
    pub kept: u64,
    pub cut_off: u64,
    pub crashes: u64,
    /// Blocks that a fetch has brought.
    pub fetched: u64,
}

impl Books {
    pub fn new(plan: &Plan, truth: &Rc<Truth>) -> Self {
        let checkers: Vec<Box<dyn Checker>> = vec![
            Box::new(unwritten::Unwritten::new(Rc::clone(truth))),
            Box::<reuse::Reuse>::default(),
            Box::new(bytes::Bytes::new(Rc::clone(truth))),
            Box::new(namespaces::Namespaces::new(Rc::clone(truth))),
            Box::<writers::Writers>::default(),
            Box::new(leases::Leases::new(plan)),
            Box::new(answers::Answers::new(Rc::clone(truth))),
            Box::<reads::Reads>::default(),
            Box::new(chains::Chains::new(Rc::clone(truth))),
            Box::<transactions::Transactions>::default(),
            Box::<generations::Generations>::default(),
            Box::<drains::Drains>::default(),
            Box::<objects::Objects>::default(),
            Box::new(versions::Versions::new(Rc::clone(truth))),
        ];
        Books {
            checkers,
            durability: durability::Durability::new(Rc::clone(truth)),
            covered: BTreeMap::new(),
            violation: None,
            trace: VecDeque::new(),
            seen_total: 0,
            tally: Tally::default(),
        }
    }

    /// Shows every checker what was seen. The first violation is kept.
    pub fn see(&mut self, now_us: u64, seen: Seen) {
        self.seen_total += 1;
        if self.violation.is_some() {
            return;
        }
        self.tally.add(&seen);
        let others = self.checkers.iter_mut().map(|checker| &mut **checker as &mut dyn Checker);
        for checker in others.chain([&mut self.durability as &mut dyn Checker]) {
            if let Err(what) = checker.see(now_us, &seen) {
                let checker = checker.name();
                self.violation = Some(Violation { checker, at_us: now_us, what });
                break;
            }
        }
        let is_routine = matches!(
            seen,
            Seen::Listing { .. } | Seen::Memory { .. } | Seen::OnSsd { .. } | Seen::Landed { .. }
        );
        if !is_routine || self.violation.is_some() {
            self.trace.push_back((now_us, seen));
        }
        if self.trace.len() > TRACE_MAX {
            self.trace.pop_front();
        }
    }

    /// Something rare has happened.
    pub fn covers(&mut self, what: &'static str) {
        *self.covered.entry(what).or_insert(0) += 1;
    }

    /// How often what has happened.
    pub fn covered(&self) -> &BTreeMap<&'static str, u64> {
        &self.covered
    }

    /// Everything that a node has to keep.
    pub fn kept(&self, node: usize) -> Vec<BlockKey> {
        self.durability.kept(node).collect()
    }

    pub fn tally(&self) -> Tally {
        self.tally
    }

    pub fn violation(&self) -> Option<&Violation> {
        self.violation.as_ref()
    }

    /// What was seen last, a line each.
    pub fn trace(&self, lines_max: usize) -> Vec<String> {
        let skip = self.trace.len().saturating_sub(lines_max);
        let line = |(at_us, seen): &(u64, Seen)| format!("{at_us:>9} us  {}", short(seen));
        self.trace.iter().skip(skip).map(line).collect()
    }
}

/// As `Debug` has it, in fewer words: transactions by their numbers, and no bytes.
fn short(seen: &Seen) -> String {
    let mut text = format!("{seen:?}");
    for (from, to, by) in [
        ("TxId { conductor_incarnation: ", "serial: ", ""),
        ("bytes: [", "]", "bytes"),
        ("Life { node: ", ", life: ", "#"),
    ] {
        let mut start = 0;
        while let Some(at) = text[start..].find(from).map(|at| start + at) {
            let Some(length) = text[at..].find(to) else { break };
            let end = at + length + to.len();
            let kept = if by == "#" {
                text[at + from.len()..at + length].to_owned()
            } else {
                String::new()
            };
            text.replace_range(at..end, &format!("{kept}{by}"));
            start = at + kept.len() + by.len();
        }
    }
    text.replace("Share { tx: ", "tx ").replace(" }, side: ", " ")
}

impl Tally {
    fn add(&mut self, seen: &Seen) {
        match seen {
            Seen::Answered { .. } => self.answered += 1,
            Seen::Kept { .. } => self.kept += 1,
            Seen::CutOff { .. } => self.cut_off += 1,
            Seen::Crashed { .. } => self.crashes += 1,
            Seen::Fetched { blocks, .. } => self.fetched += u64::from(*blocks),
            _ => {}
        }
    }
}
