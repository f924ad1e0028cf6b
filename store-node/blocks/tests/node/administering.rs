//! What administrators ask for: nothing of it goes past a pin, a share or a promise to a tenant.

use kvasir_blocks::{
    AdminPinError, Evicted, Holder, KeepRequest, ListFilter, ListFrom, Options, PIN_MS_MAX,
    SsdSize, Tier,
};
use kvasir_proto::{BlockKey, Class, Tenant};

use crate::support::{EPOCH, LEASE_MS, Node, chain, key, namespace, options, share};

/// Eight slots, and an SSD to which all of them sink.
fn node_with_ssd() -> Node {
    let mut node = Node::with(Options { demote_ahead_percent: 100, ..options(8) });
    node.blocks.set_extents(7, 10);
    let size = SsdSize { bytes_max: 100, context_bytes_max: 60, tenant_bytes_max: 40 };
    node.blocks.ssd_ready(size, Vec::new());
    node
}

fn sink_all(node: &mut Node) {
    loop {
        node.blocks.sink_ahead(node.now_ms);
        node.actions();
        if node.sinks.is_empty() {
            return;
        }
        for (sink, _) in std::mem::take(&mut node.sinks) {
            node.blocks.sunk(node.now_ms, sink, Ok(()));
        }
    }
}

fn keep(node: &mut Node, prompt: &str) {
    let request = KeepRequest {
        namespace: namespace(""),
        keys: chain(prompt),
        tenant: Tenant(1),
        expires_unix_ms: 9_000,
        created_unix_ms: None,
        copies: 1,
    };
    node.blocks.keep(node.now_ms, &request).expect("there is room");
    node.actions();
    sink_all(node);
}

fn listed(node: &Node, filter: &ListFilter, page: usize) -> Vec<BlockKey> {
    let (mut from, mut keys) = (ListFrom::START, Vec::new());
    loop {
        let part = node.blocks.list(filter, from, page);
        assert!(part.blocks.len() <= page);
        keys.extend(part.blocks.iter().map(|block| block.key));
        match part.next {
            Some(next) => from = next,
            None => return keys,
        }
    }
}

fn keys(prompts: &str) -> Vec<BlockKey> {
    prompts.split(' ').filter(|prompt| !prompt.is_empty()).map(key).collect()
}

#[test]
fn lists_have_what_their_filters_let_through_whatever_the_page() {
    let mut node = node_with_ssd();
    node.fill("1p", "abc");
    keep(&mut node, "ab");
    // What is on the SSD alone, and what is in memory alone.
    node.fill("2p", "ABCDEFG");
    sink_all(&mut node);
    let check = |filter: ListFilter, want: &str| {
        for page in [1, 2, 100] {
            let mut got = listed(&node, &filter, page);
            let mut want = keys(want);
            got.sort();
            want.sort();
            assert_eq!(got, want, "{filter:?} by {page}");
        }
    };
    let all = ListFilter::default();
    let upper = "A AB ABC ABCD ABCDE ABCDEF ABCDEFG";
    check(all, &format!("a ab abc {upper}"));
    check(ListFilter { kept: Some(true), ..all }, "a ab");
    check(ListFilter { kept: Some(false), ..all }, &format!("abc {upper}"));
    check(ListFilter { tier: Some(Tier::Dram), ..all }, upper);
    check(ListFilter { namespace: Some(namespace("other")), ..all }, "");
    check(ListFilter { tier: Some(Tier::Ssd), kept: Some(true), ..all }, "a ab");
}

#[test]
fn an_inspection_names_everyone_who_holds_the_block() {
    let mut node = node_with_ssd();
    node.fill("1p", "ab");
    keep(&mut node, "a");
    node.open("2s", "ab", 0);
    node.blocks.get(EPOCH, 5, &chain("a")).expect("pinned");
    let pin = node.blocks.admin_pin(node.now_ms, key("ab"), 100).expect("pinned");
    let found = node.blocks.inspect(key("a")).expect("it is here");
    let lease_until_ms = Some(node.now_ms + LEASE_MS);
    let by_hand = Holder::Admin { pin: pin.pin, until_ms: node.now_ms + 100 };
    let of_share = Holder::Share { share: share("2s"), lease_until_ms };
    assert_eq!(found.holders, [of_share, Holder::Engine { epoch: EPOCH }, by_hand]);
    assert_eq!((found.parent, found.checksum), (None, Some(0)));
    let dram = found.dram.expect("in memory");
    assert_eq!((dram.slot, dram.pins), (node.slot("a"), 3));
    let class = Class::Context { tenant: Tenant(1), expires_unix_ms: 9_000 };
    assert_eq!(found.ssd.map(|block| block.class), Some(class));
    assert_eq!(node.blocks.inspect(key("ab")).and_then(|found| found.parent), Some(key("a")));
    assert_eq!(node.blocks.inspect(key("X")), None);
}

#[test]
fn a_pin_holds_a_chain_until_its_time_is_over_or_it_is_ended() {
    let mut node = Node::new(8);
    node.fill("1p", "abc");
    let pin = node.blocks.admin_pin(node.now_ms, key("abc"), 500).expect("pinned");
    assert_eq!((pin.blocks, pin.until_ms), (3, node.now_ms + 500));
    node.check();
    // Five slots are left, and six are wanted.
    assert!(node.allocate(&crate::support::request("2p", "ABCDEF", 0)).is_err());
    node.now_ms += 499;
    node.blocks.handle_timeout(node.now_ms);
    assert_eq!(node.blocks.admin_pinned_blocks(), 3);
    assert_eq!(node.blocks.poll_timeout(), Some(pin.until_ms));
    node.now_ms += 1;
    node.blocks.handle_timeout(node.now_ms);
    node.assert_idle();
    assert!(!node.blocks.admin_unpin(pin.pin), "it has ended");
    let pin = node.blocks.admin_pin(node.now_ms, key("a"), 500).expect("pinned");
    assert!(node.blocks.admin_unpin(pin.pin));
    node.assert_idle();
}

#[test]
fn pins_that_cannot_be_are_refused_and_take_nothing() {
    let mut node = node_with_ssd();
    node.fill("1p", "abc");
    sink_all(&mut node);
    node.fill("2p", "ABCDEFG");
    let mut check = |prompt: &str, ttl_ms: u64, want: AdminPinError| {
        assert_eq!(node.blocks.admin_pin(1_000, key(prompt), ttl_ms), Err(want));
        node.check();
    };
    check("A", 0, AdminPinError::BadTime);
    check("A", PIN_MS_MAX + 1, AdminPinError::BadTime);
    check("X", 1, AdminPinError::NotHere);
    check("abc", 1, AdminPinError::OnSsdOnly);
    check("ABCDE", 1, AdminPinError::TooMany { wanted: 5, most: 4 });
}

#[test]
fn a_pin_by_hand_ends_when_slots_take_another_shape() {
    let mut node = Node::new(8);
    node.fill("1p", "ab");
    node.blocks.admin_pin(node.now_ms, key("ab"), 60_000).expect("pinned");
    node.blocks.reset(4, 8).expect("nothing else is held");
    node.assert_idle();
    assert_eq!(node.blocks.admin_pinned_blocks(), 0);
}

#[test]
fn a_pin_by_hand_stays_when_slots_cannot_take_another_shape() {
    let mut node = Node::new(8);
    node.fill("1p", "ab");
    let pin = node.blocks.admin_pin(node.now_ms, key("ab"), 60_000).expect("pinned");
    node.open("2p", "cd", 0);
    node.blocks.reset(4, 8).expect_err("a share is open");
    node.check();
    assert_eq!(node.blocks.admin_pinned_blocks(), 2);
    assert!(node.blocks.admin_unpin(pin.pin), "it is there");
}

#[test]
fn an_eviction_takes_what_nobody_holds_and_nothing_else() {
    let mut node = Node::new(8);
    node.fill("1p", "abc");
    node.fill("2p", "abX");
    let pin = node.blocks.admin_pin(node.now_ms, key("abX"), 60_000).expect("pinned");
    // `abc` is a leaf and idle; `a` and `ab` stay, because `abX` is held.
    let evicted = node.blocks.admin_evict(node.now_ms, key("a")).expect("it is here");
    let want = Evicted { dram_blocks: 1, pinned_blocks: 3, ..Evicted::default() };
    assert_eq!((evicted, node.cached("a ab abc abX").as_str()), (want, "a ab abX"));
    node.blocks.admin_unpin(pin.pin);
    let evicted = node.blocks.admin_evict(node.now_ms, key("ab")).expect("it is here");
    assert_eq!(evicted, Evicted { dram_blocks: 2, ..Evicted::default() });
    assert_eq!(node.cached("a ab abc abX"), "a");
    assert_eq!(node.blocks.admin_evict(node.now_ms, key("ab")), None);
    node.assert_idle();
}

#[test]
fn an_eviction_leaves_what_a_tenant_was_told_is_kept() {
    let mut node = node_with_ssd();
    node.fill("1p", "abc");
    keep(&mut node, "ab");
    sink_all(&mut node);
    let evicted = node.blocks.admin_evict_namespace(node.now_ms, namespace(""));
    let want = Evicted { dram_blocks: 3, ssd_blocks: 1, pinned_blocks: 0, kept_blocks: 2 };
    assert_eq!(evicted, want);
    node.actions();
    assert_eq!(node.forgotten, [key("abc")]);
    assert!(node.blocks.ssd_block(key("ab")).is_some());
    // Once its time is over it goes like any other.
    node.blocks.expire(9_000);
    let evicted = node.blocks.admin_evict(node.now_ms, key("a")).expect("on the SSD");
    assert_eq!(evicted, Evicted { ssd_blocks: 2, ..Evicted::default() });
    node.actions();
    // The first is gone for good, and with it what follows.
    let erased: Vec<_> = node.erased.iter().map(|(_, key)| *key).collect();
    assert_eq!((erased, &node.forgotten[1..]), (vec![key("a")], &[key("ab")][..]));
    let (sink, _) = node.erased.remove(0);
    node.blocks.sunk(node.now_ms, sink, Ok(()));
    node.actions();
    let other = node.blocks.admin_evict_namespace(node.now_ms, namespace("other"));
    assert_eq!(other, Evicted::default());
    node.assert_idle();
}
