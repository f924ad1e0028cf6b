//! `Scheduler.Schedule` over gRPC.

use kvasir_proto::v1::scheduler_client::SchedulerClient;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::super::hint::HINTS_MAX;
use super::*;
use std::sync::Arc;

use crate::serve::{Recorder, scheduler_service};

async fn client(cluster: &Cluster, recorder: &Arc<Recorder>) -> SchedulerClient<Channel> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let service = scheduler_service(cluster.clone(), Arc::clone(recorder));
    let server = tonic::transport::Server::builder().add_service(service);
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    SchedulerClient::connect(format!("http://{address}")).await.expect("connects")
}

fn request() -> v1::ScheduleRequest {
    v1::ScheduleRequest {
        model: "tiny".to_string(),
        prompt: prompt(),
        max_tokens: 10,
        ttft_objective_ms: 0,
        tbt_objective_ms: 0,
        cache_class: 0,
    }
}

async fn ask(
    client: &mut SchedulerClient<Channel>,
    change: impl FnOnce(&mut v1::ScheduleRequest),
) -> Result<v1::ScheduleReply, Status> {
    let mut request = request();
    change(&mut request);
    client.schedule(request).await.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn a_schedule_names_whom_to_call_and_books_nothing() {
    let (mut p, mut d) = (node("p", v1::Role::Prefill).await, node("d", v1::Role::Decode).await);
    let world = World::of(&[&p, &d]);
    let _to_p = followed(&mut p).await;
    let to_d = d.subscription().await;
    to_d.snapshot(0, &prompt_keys()).await;
    eventually("placed with a fetch", || world.plan().is_ok_and(|plan| plan.fetch.is_some())).await;
    let recorder = Arc::new(Recorder::new(10, 0));
    let mut client = client(&world.cluster, &recorder).await;
    let reply = ask(&mut client, |_| {}).await.expect("a schedule");
    let again = ask(&mut client, |_| {}).await.expect("a schedule");
    assert_eq!(reply.predicted_ttft_us, again.predicted_ttft_us);
    let prefill = reply.prefill.expect("named");
    assert_eq!((&*prefill.node_id, &*prefill.instance_id), ("p", "engine-p"));
    assert_eq!(prefill.node_address, p.address.to_string());
    assert_eq!((&*prefill.engine_address, prefill.cached_blocks), ("127.0.0.1:9", 0));
    let decode = reply.decode.expect("named");
    assert_eq!((&*decode.node_id, decode.cached_blocks), ("d", 10));
    assert_eq!((&*reply.fetch_from_node_id, reply.fetch_until_block), ("d", 10));
    assert_eq!((reply.block_tokens, reply.keys), (BLOCK_TOKENS, BlockKey::concat(&prompt_keys())));
    assert!(reply.explanation.contains("split engine-p -> engine-d"), "{}", reply.explanation);
    // What the caller is to say on the nodes, and what is recorded of it.
    use v1::CacheClass::{Ephemeral, Normal, Unspecified};
    for (asked, said) in [(Unspecified, Normal), (Normal, Normal), (Ephemeral, Ephemeral)] {
        let reply = ask(&mut client, |r| r.set_cache_class(asked)).await.expect("a schedule");
        assert_eq!(reply.cache_class(), said);
        let name = if said == Normal { "normal" } else { "ephemeral" };
        assert_eq!(recorder.latest()[0].full()["cache_class"], name);
    }
}

#[tokio::test]
async fn a_refusal_has_the_code_that_says_what_to_do() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let events = followed(&mut b).await;
    eventually("placed", || world.plan().is_ok()).await;
    let recorder = Arc::new(Recorder::new(10, 0));
    let mut client = client(&world.cluster, &recorder).await;
    let mut code = async |change: fn(&mut v1::ScheduleRequest)| {
        ask(&mut client, change).await.expect_err("refused")
    };
    assert_eq!(code(|r| r.model = "other".to_string()).await.code(), Code::NotFound);
    assert_eq!(code(|r| r.prompt.clear()).await.code(), Code::InvalidArgument);
    assert_eq!(code(|r| r.max_tokens = u32::MAX).await.code(), Code::InvalidArgument);
    let unknown = code(|r| r.cache_class = 7).await;
    assert_eq!(unknown.code(), Code::InvalidArgument);
    let allowed = "must be CACHE_CLASS_NORMAL or CACHE_CLASS_EPHEMERAL";
    assert!(unknown.message().contains(allowed), "{unknown}");
    // The profile says 500 us and more for a token. Idle, it would be tried.
    let load = v1::InstanceLoad { running_requests: 1, ..v1::InstanceLoad::default() };
    events.status(busy(description("b", 1, v1::Role::Both), load)).await;
    let is_busy =
        || world.plan().is_ok_and(|p| p.placement.considered.decode_candidates[0].load > 0.2);
    eventually("it is busy", is_busy).await;
    let refused = code(|r| r.tbt_objective_ms = 1).await;
    assert_eq!(refused.code(), Code::ResourceExhausted);
    let recorded = recorder.latest()[0].full();
    assert_eq!(
        (&recorded["is_schedule_only"], &recorded["refused"]),
        (&true.into(), &refused.message().into())
    );
    for side in ["prefill", "decode"] {
        let candidates = &recorded["refusal"][format!("{side}_candidates")];
        assert_eq!(candidates[0]["verdict"], "misses_tbt", "{recorded}");
    }
    let retry_after = refused.metadata().get("retry-after-ms").expect("a time to wait");
    let retry_after_ms: u64 = retry_after.to_str().expect("text").parse().expect("a number");
    assert!(retry_after_ms >= 1_000);
    let mut small = description("b", 1, v1::Role::Both);
    small.slots_total = 3;
    events.status(small).await;
    eventually("it is small", || matches!(world.plan(), Err(Refusal::TooLarge { .. }))).await;
    assert_eq!(code(|_| {}).await.code(), Code::InvalidArgument);
    let mut detached = description("b", 1, v1::Role::Both);
    detached.instances.clear();
    events.status(detached).await;
    eventually("detached", || matches!(world.plan(), Err(Refusal::NoInstance { .. }))).await;
    assert_eq!(code(|_| {}).await.code(), Code::Unavailable);
}

/// A node that does all, with the prompt on its SSD and nothing in memory.
async fn with_prompt_on_ssd() -> (FakeNode, World, Subscription) {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let events = b.subscription().await;
    events.snapshot_of_ssd(&prompt_keys()).await;
    eventually("its blocks are known", || world.held() == Some(10)).await;
    (b, world, events)
}

fn hinted(node: &FakeNode) -> Vec<Vec<u8>> {
    let hints = node.hints.lock().expect("no test panicked with it");
    hints.iter().map(|hint| hint.keys.clone()).collect()
}

#[tokio::test]
async fn a_plan_has_the_node_read_from_its_ssd_before_the_request_comes() {
    let (b, world, _events) = with_prompt_on_ssd().await;
    assert_eq!(hinted(&b).len(), 0, "nobody said that it comes");
    let mut client = client(&world.cluster, &Arc::new(Recorder::new(10, 0))).await;
    ask(&mut client, |_| {}).await.expect("a schedule");
    let keys = BlockKey::concat(&prompt_keys());
    eventually("it is told", || hinted(&b) == [keys.clone()]).await;
    eventually("it has answered", || world.metric("kvasir_conductor_prefetch_hints_total") == 1.0)
        .await;
}

#[tokio::test]
async fn nobody_is_told_to_read_what_is_in_memory() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    b.subscription().await.snapshot(0, &prompt_keys()).await;
    eventually("its blocks are known", || world.held() == Some(10)).await;
    let mut client = client(&world.cluster, &Arc::new(Recorder::new(10, 0))).await;
    ask(&mut client, |_| {}).await.expect("a schedule");
    assert_eq!(world.metric("kvasir_conductor_prefetch_hints_total"), 0.0);
    assert_eq!(world.cluster.shared().hints.available_permits(), HINTS_MAX, "none is on its way");
}

#[tokio::test]
async fn who_is_told_to_come_again_finds_read_what_was_on_the_ssd() {
    let (b, world, events) = with_prompt_on_ssd().await;
    let mut client = client(&world.cluster, &Arc::new(Recorder::new(10, 0))).await;
    // As above: busy, and too slow by the profile.
    let load = v1::InstanceLoad { running_requests: 1, ..v1::InstanceLoad::default() };
    events.status(busy(description("b", 1, v1::Role::Both), load)).await;
    let is_busy =
        || world.plan().is_ok_and(|p| p.placement.considered.decode_candidates[0].load > 0.2);
    eventually("it is busy", is_busy).await;
    let refused = ask(&mut client, |r| r.tbt_objective_ms = 1).await.expect_err("refused");
    assert_eq!(refused.code(), Code::ResourceExhausted);
    let keys = BlockKey::concat(&prompt_keys());
    eventually("it is told", || hinted(&b) == [keys.clone()]).await;
    // Who can never be served is not expected again.
    let never = ask(&mut client, |r| r.max_tokens = u32::MAX).await.expect_err("refused");
    assert_eq!((never.code(), hinted(&b).len()), (Code::InvalidArgument, 1));
}
