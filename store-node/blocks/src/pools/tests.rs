//! The table against a naive model that keeps every hold, copy and drop as a list, over random calls under a seed.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_proto::{BlockKey, Namespace};

use super::{PageState, PoolTable};
use crate::api::PoolError;

const PAGES: u32 = 6;
const KEYS: u64 = 4;
const NAMESPACE: Namespace = Namespace([7; 16]);

fn key(number: u64) -> BlockKey {
    BlockKey(u128::from(number).to_le_bytes())
}

fn table() -> PoolTable {
    PoolTable::new(PAGES)
}

#[derive(Debug, Default)]
struct Model {
    /// Pages in which shares are computed.
    computed: BTreeSet<u32>,
    held: BTreeMap<u32, u64>,
    /// Pages that were given to the node to fill.
    filling: BTreeSet<u32>,
    reads: Vec<u32>,
    writes: Vec<u32>,
    drops: BTreeMap<u64, Vec<u32>>,
    next_handle: u64,
}

impl Model {
    fn dropping(&self, page: u32) -> bool {
        self.drops.values().flatten().any(|of| *of == page)
    }

    fn is_free(&self, page: u32) -> bool {
        self.may_be_held(page) && !self.computed.contains(&page)
    }

    fn may_be_held(&self, page: u32) -> bool {
        !self.held.contains_key(&page) && !self.filling.contains(&page) && !self.dropping(page)
    }

    fn touched(&self, page: u32) -> bool {
        self.reads.contains(&page) || self.writes.contains(&page)
    }

    /// Drops whose pages nothing touches are answered; nothing else is.
    fn answered(&mut self, table: &mut PoolTable) {
        let over: Vec<u64> = self
            .drops
            .iter()
            .filter(|(_, pages)| pages.iter().all(|page| !self.touched(*page)))
            .map(|(handle, _)| *handle)
            .collect();
        let mut said = BTreeSet::new();
        while let Some(handle) = table.next_dropped() {
            assert!(said.insert(handle), "drop {handle} is answered twice");
        }
        assert_eq!(said, over.iter().copied().collect(), "other drops are answered");
        over.iter().for_each(|handle| drop(self.drops.remove(handle)));
    }

    fn compare(&self, table: &PoolTable) {
        table.check(&self.reads, &self.writes).expect("the books balance");
        let held: BTreeSet<u64> = self.held.values().copied().collect();
        let said: BTreeSet<BlockKey> = table.keys().collect();
        assert_eq!(said, held.iter().copied().map(key).collect());
        for page in 0..PAGES {
            let free = table.pages[page as usize] == PageState::Free;
            assert_eq!(free, self.is_free(page), "page {page} of {self:?}");
        }
    }
}

fn random(state: &mut u64, below: usize) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state % below as u64) as usize
}

fn run(seed: u64) {
    let (mut table, mut model, mut state) = (table(), Model::default(), seed | 1);
    for step in 0..400 {
        let page = random(&mut state, PAGES as usize) as u32;
        match random(&mut state, 10) {
            8 => {
                let may = table.check_free(&[page]).is_ok();
                assert_eq!(may, model.is_free(page));
                if may {
                    table.compute(&[page]);
                    model.computed.insert(page);
                }
            }
            9 => {
                let may = model.computed.contains(&page) || model.held.contains_key(&page);
                assert_eq!(table.begin_carry(page), may);
                if may {
                    model.reads.push(page);
                }
            }
            0 | 1 => {
                let may = table.check_hold(&[page]).is_ok();
                assert_eq!(may, model.may_be_held(page));
                if may {
                    let number = random(&mut state, KEYS as usize) as u64;
                    let is_new = !model.held.values().any(|of| *of == number);
                    let said = table.hold(step, page, key(number), (NAMESPACE, None));
                    assert_eq!(said, is_new);
                    model.held.insert(page, number);
                    model.computed.remove(&page);
                }
            }
            2 => {
                let number = random(&mut state, KEYS as usize) as u64;
                let page = table.begin_read(key(number));
                assert_eq!(page.is_some(), model.held.values().any(|of| *of == number));
                if let Some(page) = page {
                    assert_eq!(model.held.get(&page), Some(&number));
                    model.reads.push(page);
                }
            }
            3 if !model.reads.is_empty() => {
                let at = random(&mut state, model.reads.len());
                table.end_read(model.reads.swap_remove(at));
            }
            4 if model.is_free(page) => {
                table.begin_fill(&[page]);
                model.filling.insert(page);
            }
            5 => {
                let fills = model.filling.contains(&page) && !model.touched(page);
                assert_eq!(table.begin_write(page), fills);
                if fills {
                    model.writes.push(page);
                }
            }
            6 if !model.writes.is_empty() => {
                let page = model.writes.swap_remove(random(&mut state, model.writes.len()));
                table.end_write(page);
                if random(&mut state, 2) == 0 {
                    table.end_fill(&[page]);
                    model.filling.remove(&page);
                }
            }
            7 => {
                let pages = [page, (page + 1) % PAGES];
                let may = table.check_drop(&pages).is_ok();
                assert_eq!(may, !pages.iter().any(|page| model.dropping(*page)));
                if may {
                    let last = table.last_of(&pages);
                    model.next_handle += 1;
                    let gone = table.drop_pages(model.next_handle, &pages);
                    assert_eq!(
                        gone.iter().collect::<BTreeSet<_>>(),
                        last.iter().collect::<BTreeSet<_>>()
                    );
                    assert_eq!(gone.len(), last.len());
                    for page in pages {
                        model.computed.remove(&page);
                        model.held.remove(&page);
                        model.filling.remove(&page);
                    }
                    model.drops.insert(model.next_handle, pages.to_vec());
                }
            }
            _ => {}
        }
        model.answered(&mut table);
        model.compare(&table);
    }
    // Every drop is answered when the copies are over.
    std::mem::take(&mut model.reads).into_iter().for_each(|page| table.end_read(page));
    std::mem::take(&mut model.writes).into_iter().for_each(|page| table.end_write(page));
    model.answered(&mut table);
    model.compare(&table);
    assert!(model.drops.is_empty());
    assert_eq!(table.tally().dropping, 0);
}

#[test]
fn pages_go_back_when_nothing_touches_them_and_are_held_exactly_as_said() {
    for seed in 1..300 {
        run(seed * 0x9E37_79B9);
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let mut table = table();
    assert_eq!(table.check_free(&[1, 6]), Err(PoolError::NoSuchPage { page: 6, pages: 6 }));
    assert_eq!(table.check_free(&[1, 2, 1]), Err(PoolError::Twice { page: 1 }));
    assert!(table.hold(0, 2, key(1), (NAMESPACE, None)));
    assert_eq!(table.check_free(&[1, 2]), Err(PoolError::Taken { page: 2, state: "held" }));
    assert!(!table.fits(key(1), NAMESPACE, Some(key(9))));
    assert!(!table.fits(key(1), Namespace([8; 16]), None));
    assert!(table.fits(key(1), NAMESPACE, None));
    assert_eq!(table.begin_read(key(1)), Some(2));
    table.drop_pages(9, &[2]);
    let taken = PoolError::Taken { page: 2, state: "being dropped" };
    assert_eq!(table.check_drop(&[2]), Err(taken));
    assert_eq!(table.check_free(&[2]), Err(taken));
}

#[test]
fn a_prefix_follows_parents_and_stays_in_its_namespace() {
    let mut table = table();
    for page in 0..3u32 {
        let parent = page.checked_sub(1).map(|before| key(u64::from(before)));
        table.hold(0, page, key(page.into()), (NAMESPACE, parent));
    }
    let keys = [key(0), key(1), key(2), key(3)];
    assert_eq!(table.prefix(NAMESPACE, None, &keys), 3);
    assert_eq!(table.prefix(NAMESPACE, Some(key(0)), &keys[1..]), 2);
    assert_eq!(table.prefix(NAMESPACE, None, &keys[1..]), 0);
    assert_eq!(table.prefix(Namespace([8; 16]), None, &keys), 0);
}
