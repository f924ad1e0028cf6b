//! Parts of a prompt that are used as if each stood alone: what the conductor asks of nodes and engines for them.

use kvasir_conductor::{Config, RoutesConfig};
use kvasir_proto::{BlockKey, Namespace, Side, keys, v1};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tonic::Code;

use crate::support::{
    BLOCK_TOKENS, Happened, Harness, Leg, Pair, Reply, Response, Role, Script, World, config,
};

const COMPLETIONS: &str = "/v1/completions";
const CHATS: &str = "/v1/chat/completions";
/// `printf %s first-key | sha256sum`.
const FIRST_HASH: &str = "9e24b55356ef2a121ab5fd1a3ee8a3c9191e837f3853e399a369e9044ff183f7";
/// Between documents, and of a document.
const GAP: usize = 20;
const TOKENS: usize = 2 * BLOCK_TOKENS as usize;

fn document(number: usize) -> Vec<u32> {
    (0..TOKENS).map(|token| (500 + number * TOKENS + token) as u32).collect()
}

/// Where the documents stand.
fn places(documents: usize) -> Vec<std::ops::Range<u32>> {
    let start = |number: usize| GAP + number * (GAP + TOKENS);
    (0..documents).map(|at| start(at) as u32..(start(at) + TOKENS) as u32).collect()
}

fn prompt(documents: usize) -> Vec<u32> {
    let of = |number: usize| [vec![number as u32 + 1; GAP], document(number)].concat();
    [(0..documents).flat_map(of).collect(), vec![9; 9]].concat()
}

fn body(documents: usize) -> Value {
    let named = |place: &std::ops::Range<u32>| json!({"start": place.start, "end": place.end});
    let chunks: Vec<Value> = places(documents).iter().map(named).collect();
    json!({"model": "tiny", "prompt": prompt(documents), "max_tokens": 2, "seed": 1,
        "kvasir_chunks": chunks})
}

fn root(salt: &str) -> Namespace {
    keys::namespace(&[7; 32], "f32", salt, "")
}

/// Of these documents, as prompts of their own.
fn documents_keys(salt: &str, documents: std::ops::Range<usize>) -> Vec<u8> {
    let keys = |number| keys::chain(root(salt), &document(number), BLOCK_TOKENS as usize);
    BlockKey::concat(&documents.flat_map(keys).collect::<Vec<_>>())
}

fn has(keys: Vec<u8>) -> Script {
    Script { keys, routes: true, ..Script::default() }
}

/// Engines that do both: `b` has nothing, or what it is said to have, and the others what their scripts say.
struct Bench {
    world: World,
    pairs: Vec<Pair>,
    harness: Harness,
}

impl Bench {
    async fn start(holders: &[(&'static str, Script)], change: impl FnOnce(&mut Config)) -> Bench {
        Bench::start_with(has(Vec::new()), holders, change).await
    }

    async fn start_with(
        own: Script,
        holders: &[(&'static str, Script)],
        change: impl FnOnce(&mut Config),
    ) -> Bench {
        let world = World::default();
        let mut pairs = vec![Pair::start(&world, "b", Role::Both, own).await];
        for (name, script) in holders {
            pairs.push(Pair::start(&world, name, Role::Both, script.clone()).await);
        }
        let mut config = Config {
            chunk_reuse_enabled: true,
            steering_enabled: true,
            routes: RoutesConfig { enabled: true, ..RoutesConfig::default() },
            ..config(&pairs.iter().collect::<Vec<_>>())
        };
        config.decision_inputs_bytes_max = 1 << 20;
        change(&mut config);
        let harness = Harness::start(config).await;
        Bench { world, pairs, harness }
    }

    /// Asks the engine of `b`, with this way to what is elsewhere.
    fn ask(&self, body: Value, way: &'static str, key: &'static str) -> JoinHandle<Response> {
        let request = self.harness.client.post(format!("{}{COMPLETIONS}", self.harness.url));
        let request = request.header("x-kvasir-instance", "engine-b").bearer_auth(key);
        let request = request.header("x-kvasir-prefix", way).body(body.to_string());
        tokio::spawn(async move { Response::read(request.send().await.expect("an answer")).await })
    }

    async fn answered(&self, body: Value, way: &'static str) {
        let response = self.ask(body, way, "").await.expect("no panic");
        assert_eq!(response.status, 200, "{response:?}");
    }

    /// What the serving node was asked for last, and what its engine was.
    fn served(&self) -> (v1::TxAllocateRequest, v1::GenerateRequest) {
        let log = self.world.log();
        let reserved = log.iter().rev().find_map(|happened| match happened {
            Happened::Allocate { node: "b", request, .. } => Some(request.clone()),
            _ => None,
        });
        let generated = log.iter().rev().find_map(|happened| match happened {
            Happened::Generate { node: "b", request, .. } => Some(request.clone()),
            _ => None,
        });
        (reserved.expect("slots"), generated.expect("a call"))
    }

    /// What a decision for a request of this id reads of an instance.
    async fn seen(&self, id: &str, instance: &str) -> Value {
        let inputs = self.inputs(id).await;
        let mut instances = inputs["instances"].as_array().expect("a list").iter();
        let found = instances.find(|one| one["instance"] == *instance).expect("it is there");
        inputs["hosts"][found["host"].as_u64().expect("a number") as usize].clone()
    }

    /// What it reads at all.
    async fn inputs(&self, id: &str) -> Value {
        let request = self.harness.client.post(format!("{}{COMPLETIONS}", self.harness.url));
        let request = request.header("x-kvasir-instance", "engine-h").header("x-request-id", id);
        let body = json!({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1});
        let answered = Response::read(request.body(body.to_string()).send().await.expect("one"));
        assert_eq!(answered.await.status, 200);
        let url = format!("{}/decisions/{id}/inputs", self.harness.watch);
        let found = self.harness.client.get(url).send().await.expect("an answer");
        let found: Value = found.json().await.expect("JSON");
        let decisions = found["decisions"].as_array().expect("a list");
        decisions[0]["inputs"].clone()
    }

    fn pinned(&self) -> usize {
        self.world.count(|h| is_pin(h, |_| true))
    }

    fn copied(&self) -> usize {
        self.world.count(|h| matches!(h, Happened::Replicate { .. }))
    }
}

fn is_pin(happened: &Happened, at: impl Fn(&str) -> bool) -> bool {
    match happened {
        Happened::Allocate { node, request, .. } => {
            at(node) && request.side == Side::Source.to_wire()
        }
        _ => false,
    }
}

fn routed(generated: &v1::GenerateRequest) -> Vec<usize> {
    generated.chunks.iter().map(|chunk| chunk.routed.len()).collect()
}

#[tokio::test]
async fn rows_behind_a_chunk_are_nobody_elses_and_their_keys_no_other_prompts() {
    let bench = Bench::start(&[("h", has(documents_keys("", 0..1)))], |_| ()).await;
    let class = |class: v1::CacheClass| i32::from(class);
    let size = BLOCK_TOKENS as usize;
    let mut exact = body(1);
    exact.as_object_mut().expect("an object").remove("kvasir_chunks");
    bench.answered(exact.clone(), "recompute").await;
    let (reserved, _) = bench.served();
    assert_ne!(reserved.cache_class, class(v1::CacheClass::Ephemeral));
    assert_eq!(reserved.keys, BlockKey::concat(&keys::chain(root(""), &prompt(1), size)));
    let behind = keys::chain_with_chunks(root(""), &prompt(1), size, &places(1));
    for (way, elsewhere) in [("recompute", 0), ("fetch", 0), ("route", TOKENS)] {
        bench.answered(body(1), way).await;
        let (reserved, generated) = bench.served();
        assert_eq!(reserved.cache_class, class(v1::CacheClass::Ephemeral), "{way}");
        assert_eq!(routed(&generated), [usize::from(elsewhere > 0)], "{way}");
        let tokens = prompt(1).len() - elsewhere;
        assert_eq!(reserved.prompt_tokens as usize, tokens, "{way}");
        assert_eq!(reserved.keys, BlockKey::concat(&behind[..tokens / size]), "{way}");
    }
}

#[tokio::test]
async fn rows_behind_a_prefix_that_stays_elsewhere_are_nobody_elses() {
    let prefix = keys::chain(root(""), &prompt(3), BLOCK_TOKENS as usize);
    let bench = Bench::start(&[("h", has(BlockKey::concat(&prefix)))], |_| ()).await;
    let mut whole = body(3);
    whole.as_object_mut().expect("an object").remove("kvasir_chunks");
    bench.answered(whole, "route").await;
    let (reserved, generated) = bench.served();
    assert_eq!(generated.routed.len(), 1, "{generated:?}");
    assert_eq!(reserved.cache_class, i32::from(v1::CacheClass::Ephemeral));
}

/// Of the prompt `b` has as many blocks as it says, and says so again or does not when it is asked for slots.
async fn with_a_beginning_here(blocks: u32, cached_blocks: u32) -> (Bench, Value, Vec<BlockKey>) {
    let prefix = keys::chain(root(""), &prompt(3), BLOCK_TOKENS as usize);
    let own = Script { cached_blocks, ..has(BlockKey::concat(&prefix[..blocks as usize])) };
    let holders = [("h", has(BlockKey::concat(&prefix)))];
    let bench = Bench::start_with(own, &holders, |_| ()).await;
    let mut whole = body(3);
    whole.as_object_mut().expect("an object").remove("kvasir_chunks");
    (bench, whole, prefix)
}

#[tokio::test]
async fn blocks_that_are_here_are_used_here_and_what_follows_them_stays_elsewhere() {
    let (bench, whole, prefix) = with_a_beginning_here(2, 2).await;
    bench.answered(whole, "route").await;
    let (reserved, generated) = bench.served();
    let [part] = &generated.routed[..] else { panic!("{generated:?}") };
    let end = (prompt(3).len() - 1) / BLOCK_TOKENS as usize;
    assert_eq!((part.first_block, (part.first_block + part.blocks) as usize), (2, end));
    let slots = [&prefix[..2], &prefix[end..]].concat();
    assert_eq!(reserved.keys, BlockKey::concat(&slots));
    let away = (end - 2) * BLOCK_TOKENS as usize;
    assert_eq!(reserved.prompt_tokens as usize, prompt(3).len() - away);
    assert_eq!(reserved.cache_class, i32::from(v1::CacheClass::Ephemeral));
    assert_eq!((bench.pinned(), bench.world.count(is_generated)), (1, 1));
}

#[tokio::test]
async fn a_first_connection_says_nothing_of_how_long_routes_take_to_open() {
    let (bench, whole, _) = with_a_beginning_here(0, 0).await;
    let open_us = async |id: &str| {
        let inputs = bench.inputs(id).await;
        let number = inputs["routes"]["open_us"].as_str().expect("every digit of it");
        number.parse::<f64>().expect("a number")
    };
    let mut known_us = vec![open_us("before").await];
    for (id, is_first) in [("first", true), ("next", false)] {
        bench.pairs[0].change(|script| script.opening = (1_000_000, is_first));
        bench.answered(whole.clone(), "route").await;
        assert_eq!(bench.served().1.routed.len(), 1);
        known_us.push(open_us(id).await);
    }
    assert_eq!(known_us[0], known_us[1]);
    // One outlier moves it by a part only.
    assert!(known_us[2] > known_us[1] + 100.0, "{known_us:?}");
}

/// Of a prompt that its node could not hold, and of which another one has the beginning.
#[tokio::test]
async fn what_is_too_large_once_its_holder_is_lost_is_not_called_too_large() {
    let prefix = keys::chain(root(""), &prompt(3), BLOCK_TOKENS as usize);
    let own = Script { slots: 4, cached_blocks: 1, ..has(BlockKey::concat(&prefix[..1])) };
    let holders = [("h", Script { slots: 4, ..has(BlockKey::concat(&prefix)) })];
    let bench = Bench::start_with(own, &holders, |_| ()).await;
    let mut whole = body(3);
    whole.as_object_mut().expect("an object").remove("kvasir_chunks");
    bench.answered(whole.clone(), "route").await;
    assert_eq!(bench.served().1.routed.len(), 1);
    // What is before the blocks that stay elsewhere is gone when it is asked for: all would have to be here.
    bench.pairs[0].change(|script| script.cached_blocks = 0);
    let lost = bench.ask(whole.clone(), "route", "").await.expect("no panic");
    assert_eq!(lost.status, 503, "it may well stay there next time: {lost:?}");
    assert!(lost.text.contains("cannot query a prefix on another node"), "{lost:?}");
    // Where nobody has a beginning of it, that is what is said.
    let mut other = whole;
    other["prompt"] = json!((0..165).map(|token| 700 + token % 90).collect::<Vec<u32>>());
    let never = bench.ask(other, "route", "").await.expect("no panic");
    assert_eq!(never.status, 400, "{never:?}");
}

#[tokio::test]
async fn what_prompts_ask_of_holders_is_learned() {
    let (bench, whole, _) = with_a_beginning_here(0, 0).await;
    let layer = async |id: &str| {
        let inputs = bench.inputs(id).await;
        let numbers = inputs["routes"]["layer"].as_array().expect("numbers");
        numbers.iter().map(|number| number.as_str().expect("digits").to_owned()).collect::<Vec<_>>()
    };
    bench.answered(whole.clone(), "route").await;
    let before = layer("before").await;
    bench.pairs[0].change(|script| script.prompt_routed = (8, 8_000_000, 40));
    bench.answered(whole, "route").await;
    assert_ne!(layer("after").await, before);
}

fn is_generated(happened: &Happened) -> bool {
    matches!(happened, Happened::Generate { .. })
}

#[tokio::test]
async fn where_blocks_before_those_that_stay_elsewhere_are_gone_all_is_computed() {
    let (bench, whole, prefix) = with_a_beginning_here(2, 1).await;
    bench.answered(whole, "route").await;
    let (reserved, generated) = bench.served();
    assert!(generated.routed.is_empty(), "{generated:?}");
    assert_eq!(reserved.keys, BlockKey::concat(&prefix));
    assert_eq!(reserved.prompt_tokens as usize, prompt(3).len());
    assert_eq!(bench.world.count(is_generated), 1, "no engine was called before");
    for (node, side) in [("h", Side::Source), ("b", Side::Prefill)] {
        let is_abort = |happened: &Happened| match happened {
            Happened::Abort { node: of, side: which, .. } => (*of, *which) == (node, side),
            _ => false,
        };
        bench.world.until("an abort", |log| log.iter().any(is_abort)).await;
    }
}

/// A kernel so slow that each holder that takes a part is worth it.
fn slow_holders(config: &mut Config, folder: &std::path::Path) {
    let file = folder.join("kernel.toml");
    let kernel = "launch_us = 1.0\ntoken_us = 100.0\nflat_rows = 64\nrow_token_us = 0.0\n\
                  [selected]\nbase_factor = 1.0\ntoken_factor = 0.0\n";
    std::fs::write(&file, kernel).expect("written");
    config.routes.kernel_file = Some(file);
}

/// `h` and `i` have the whole of it.
async fn with_two_holders(folder: &std::path::Path) -> (Bench, Value) {
    let prefix = keys::chain(root(""), &prompt(3), BLOCK_TOKENS as usize);
    let all = has(BlockKey::concat(&prefix));
    let holders = [("h", all.clone()), ("i", all)];
    let bench = Bench::start(&holders, |config| slow_holders(config, folder)).await;
    let mut whole = body(3);
    whole.as_object_mut().expect("an object").remove("kvasir_chunks");
    (bench, whole)
}

#[tokio::test]
async fn a_prefix_that_two_nodes_have_is_attended_by_both_each_a_part() {
    let folder = tempfile::tempdir().expect("a folder");
    let (bench, whole) = with_two_holders(folder.path()).await;
    bench.answered(whole, "route").await;
    let (_, generated) = bench.served();
    let [first, second] = &generated.routed[..] else { panic!("{generated:?}") };
    assert_ne!(first.node_address, second.node_address);
    assert_eq!((first.first_block, second.first_block), (0, first.blocks));
    assert!(first.blocks - second.blocks <= 1, "{generated:?}");
    let blocks = (prompt(3).len() - 1) / BLOCK_TOKENS as usize;
    assert_eq!((first.blocks + second.blocks) as usize, blocks);
    assert_eq!(bench.pinned(), 2);
}

#[tokio::test]
async fn where_one_of_two_holders_has_lost_it_the_prefix_is_computed_and_the_other_lets_it_go() {
    let folder = tempfile::tempdir().expect("a folder");
    let (bench, whole) = with_two_holders(folder.path()).await;
    bench.pairs[2].change(|script| script.pin = Reply::Fail(Code::Aborted));
    bench.answered(whole, "route").await;
    let (reserved, generated) = bench.served();
    assert!(generated.routed.is_empty(), "{generated:?}");
    assert_eq!(reserved.prompt_tokens as usize, prompt(3).len(), "all of it has slots");
    let is_abort = |happened: &Happened| match happened {
        Happened::Abort { node, side, .. } => *node == "h" && *side == Side::Source,
        _ => false,
    };
    bench.world.until("an abort", |log| log.iter().any(is_abort)).await;
}

#[tokio::test]
async fn nobody_names_chunks_where_they_are_off() {
    let bench = Bench::start(&[], |config| config.chunk_reuse_enabled = false).await;
    let chat = json!({"model": "tiny", "max_tokens": 2, "kvasir_chunks": [{"text": "a document"}],
        "messages": [{"role": "user", "content": "What is in a document?"}]});
    for (path, body) in [(COMPLETIONS, body(1)), (CHATS, chat)] {
        let refused = bench.harness.ask(path, body).await;
        assert_eq!(refused.status, 400, "{path}: {refused:?}");
        assert_eq!(refused.json()["error"]["param"], "kvasir_chunks");
        assert!(refused.text.contains("`chunk_reuse_enabled` is off"), "{refused:?}");
    }
    assert_eq!(bench.world.log(), []);
}

#[tokio::test]
async fn a_tenants_chunks_are_neither_attended_nor_fetched_by_another() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("keys.toml");
    let second = folder.path().join("second");
    std::fs::write(&second, "second-key").expect("writes");
    let tenants = format!(
        "[[tenants]]\nname = \"a\"\nkeys = [{{ sha256 = \"{FIRST_HASH}\" }}]\n\
         [[tenants]]\nname = \"b\"\nkeys = [{{ file = \"second\" }}]\n"
    );
    std::fs::write(&file, tenants).expect("writes");
    let holders = [("h", has(documents_keys("a", 0..1)))];
    let bench = Bench::start(&holders, |config| config.api_keys_file = Some(file.clone())).await;
    let asks = [
        ("second-key", "b", [("route", 0, 0), ("fetch", 0, 0)]),
        ("first-key", "a", [("route", 1, 0), ("fetch", 1, 1)]),
    ];
    for (key, tenant, ways) in asks {
        for (way, pinned, copied) in ways {
            let response = bench.ask(body(1), way, key).await.expect("no panic");
            assert_eq!(response.status, 200, "{response:?}");
            assert_eq!((bench.pinned(), bench.copied()), (pinned, copied), "{tenant}: {way}");
            let (reserved, generated) = bench.served();
            let routes = usize::from(tenant == "a" && way == "route");
            assert_eq!(routed(&generated), [routes], "{tenant}: {way}");
            // What the engine looks up itself begins there too.
            assert_eq!(generated.namespace, root(tenant).0, "{tenant}: {way}");
            assert_eq!(reserved.namespace, root(tenant).0, "{tenant}: {way}");
        }
    }
    // Nor does anybody say whose it is.
    let mut other = body(1);
    other["cache_salt"] = "a".into();
    let answered = bench.ask(other, "route", "second-key").await.expect("no panic");
    assert_eq!(answered.status, 200, "{answered:?}");
    let (reserved, generated) = bench.served();
    assert_eq!((routed(&generated), bench.copied()), (vec![0], 1), "{reserved:?}");
    assert_eq!(reserved.namespace, root("b\0a").0);
}

#[tokio::test]
async fn chunks_are_pinned_at_once_and_renewed_while_others_are_waited_for() {
    let slow = Script { pin: Reply::Hold, ..has(documents_keys("", 0..1)) };
    let holders = [("slow", slow), ("h", has(documents_keys("", 1..2)))];
    // It is renewed after a third of it, and the slow one is to answer within it.
    let bench = Bench::start(&holders, |config| config.lease_ms = 6_000).await;
    let asked = bench.ask(body(2), "route", "");
    let renewed = |h: &Happened| matches!(h, Happened::Renew { node: "h", side: Side::Source, .. });
    bench.world.until("a renewal of the one", |log| log.iter().any(renewed)).await;
    bench.pairs[1].change(|script| script.pin = Reply::Do);
    let response = asked.await.expect("no panic");
    assert_eq!(response.status, 200, "{response:?}");
    let (_, generated) = bench.served();
    assert_eq!(routed(&generated), [1, 1], "neither was waited for in vain");
    assert_eq!(bench.world.count(|h| matches!(h, Happened::RanOut { .. })), 0);
}

#[tokio::test]
async fn the_conductor_renews_a_chunk_until_the_first_token() {
    let holders = [("h", has(documents_keys("", 0..1)))];
    let bench = Bench::start(&holders, |config| config.lease_ms = 1_500).await;
    let renewals = |log: &[Happened]| -> Vec<u64> {
        let tx = |happened: &Happened| match happened {
            Happened::Renew { node: "h", tx, side: Side::Source } => Some(*tx),
            _ => None,
        };
        log.iter().filter_map(tx).collect()
    };
    let decodes = |leg| bench.pairs[0].change(|script| script.decode = leg);
    decodes(Leg::Hold);
    let first = bench.ask(body(1), "route", "");
    bench.world.until("a renewal", |log| !renewals(log).is_empty()).await;
    decodes(Leg::HangAfter(1));
    bench.harness.until_metric("kvasir_conductor_ttft_seconds_count", |count| count == 1.0).await;
    let before = renewals(&bench.world.log());
    // As long as another one is renewed several times.
    decodes(Leg::Hold);
    let second = bench.ask(body(1), "route", "");
    let others = |log: &[Happened]| {
        let of_first = |tx: &u64| *tx == before[0];
        renewals(log).into_iter().filter(|tx| !of_first(tx)).count()
    };
    bench.world.until("renewals of the other", |log| others(log) >= 3).await;
    let after = renewals(&bench.world.log());
    let of_first = after.iter().filter(|tx| **tx == before[0]).count();
    assert!(of_first <= before.len() + 1, "one may have been on its way: {after:?}");
    first.abort();
    second.abort();
}

#[tokio::test]
async fn a_chunk_that_cannot_be_pinned_is_computed_in_slots_of_the_request() {
    let declines = Script { pin: Reply::Fail(Code::Aborted), ..has(documents_keys("", 0..1)) };
    let holders = [("declines", declines), ("h", has(documents_keys("", 1..2)))];
    let bench = Bench::start(&holders, |_| ()).await;
    bench.answered(body(2), "route").await;
    let (reserved, generated) = bench.served();
    assert_eq!(routed(&generated), [0, 1]);
    assert_eq!(reserved.prompt_tokens as usize, prompt(2).len() - TOKENS);
}

#[tokio::test]
async fn what_becomes_of_chunks_is_what_others_are_placed_beside() {
    let declines = Script { pin: Reply::Fail(Code::Aborted), ..has(documents_keys("", 0..1)) };
    let holders = [("declines", declines), ("h", has(documents_keys("", 1..2)))];
    let bench = Bench::start(&holders, |_| ()).await;
    bench.pairs[0].change(|script| script.decode = Leg::Hold);
    let called = |calls: usize| {
        move |log: &[Happened]| {
            let is_call = |h: &&Happened| matches!(h, Happened::Generate { node: "b", .. });
            log.iter().filter(is_call).count() == calls
        }
    };
    let routed = bench.ask(body(2), "route", "");
    bench.world.until("a call", called(1)).await;
    assert_eq!(bench.seen("one", "engine-declines").await["routes_out"], json!([]));
    assert_eq!(bench.seen("two", "engine-h").await["routes_out"][0][1], 1);
    let fetched = bench.ask(body(2), "fetch", "");
    bench.world.until("another call", called(2)).await;
    assert_eq!(bench.copied(), 2);
    assert_eq!(bench.seen("three", "engine-b").await["bytes_in"], 0, "all has come");
    routed.abort();
    fetched.abort();
}

#[tokio::test]
async fn copies_of_chunks_are_asked_for_a_few_at_a_time_and_have_one_time_together() {
    let keys = documents_keys("", 0..6);
    let bench = Bench::start(&[("h", has(keys.clone()))], |_| ()).await;
    bench.answered(body(6), "fetch").await;
    assert_eq!(bench.copied(), 6);

    // The first ones take all the time that there is for all of them.
    let hangs = Script { replicate: Reply::Hang, ..has(keys) };
    let bench = Bench::start(&[("h", hangs)], |config| config.request_timeout_ms = 6_000).await;
    bench.answered(body(6), "fetch").await;
    assert_eq!(bench.copied(), 4);
    let (_, generated) = bench.served();
    assert_eq!(routed(&generated), [0; 6], "they are computed");
}
