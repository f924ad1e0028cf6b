//! Chunks that are used at another offset, with this test in the conductor's place: the tokens are the same
//! whether a chunk is copied, attended where it lies or computed alone, and whatever is lost on the way; and
//! nobody who did not ask for it finds anything of it.

use std::ops::Range;

use futures::future::join_all;
use kvasir_proto::{BlockKey, keys};

use super::with_nodes::{Answered, Ask, BLOCK, Host, LEASE_MS, cases};
use super::*;
use crate::config::Role;

/// A prompt of the reference vectors, and which parts of it are used as chunks.
struct Reuse {
    prompt: Vec<u32>,
    /// What the prompt is answered with when it is computed whole.
    greedy: Vec<u32>,
    chunks: Vec<Range<usize>>,
}

impl Reuse {
    /// Of a prompt of 600 tokens: one chunk that begins in a block, or several that lie in all ways.
    fn new(chunks: &[Range<usize>]) -> Reuse {
        let case = cases().into_iter().find(|case| case.prompt.len() == 600).expect("there is one");
        Reuse { prompt: case.prompt, greedy: case.greedy, chunks: chunks.to_vec() }
    }

    fn one() -> Reuse {
        Reuse::new(std::slice::from_ref(&(200..200 + 4 * BLOCK)))
    }

    fn several() -> Reuse {
        let (one, two) = (BLOCK, 2 * BLOCK);
        Reuse::new(&[1..1 + one, 65..65 + one, 192..192 + two, 333..333 + one, 535..535 + one])
    }

    fn tokens(&self) -> u32 {
        self.greedy.len() as u32
    }

    fn ask(&self, serial: u64, max_tokens: u32) -> Ask {
        Ask { serial, prompt: self.prompt.clone(), max_tokens }
    }

    /// The chunk as a prompt of its own.
    fn alone(&self, serial: u64, chunk: usize) -> Ask {
        let prompt = self.prompt[self.chunks[chunk].clone()].to_vec();
        Ask { serial, prompt, max_tokens: 1 }
    }

    /// As the engine is asked: `routed` is whom, of each chunk.
    fn wire(&self, routed: impl Fn(usize) -> Vec<v1::RoutedSpan>) -> Vec<v1::Chunk> {
        let chunk = |(at, chunk): (usize, &Range<usize>)| v1::Chunk {
            first_position: chunk.start as u32,
            blocks: (chunk.len() / BLOCK) as u32,
            routed: routed(at),
        };
        self.chunks.iter().enumerate().map(chunk).collect()
    }
}

impl Host {
    /// Computes the chunks alone, so that they are here.
    async fn learn(&self, reuse: &Reuse, serial: u64) {
        for chunk in 0..reuse.chunks.len() {
            self.whole(&reuse.alone(serial + chunk as u64, chunk)).await;
        }
    }

    async fn reserve(&self, reuse: &Reuse, ask: &Ask, tokens_elsewhere: u32) {
        let positions = |chunk: &Range<usize>| chunk.start as u32..chunk.end as u32;
        let chunks: Vec<_> = reuse.chunks.iter().map(positions).collect();
        let mut keys = keys::chain_with_chunks(self.namespace, &ask.prompt, BLOCK, &chunks);
        let prompt_tokens = ask.prompt.len() as u32 - tokens_elsewhere;
        keys.truncate(prompt_tokens as usize / BLOCK);
        let request = v1::TxAllocateRequest {
            tx: Some(ask.tx()),
            side: v1::Side::Prefill.into(),
            namespace: self.namespace.0.to_vec(),
            keys: BlockKey::concat(&keys),
            prompt_tokens,
            lease_ms: LEASE_MS,
            generated_tokens_max: ask.max_tokens,
            cache_class: v1::CacheClass::Ephemeral.into(),
            ..v1::TxAllocateRequest::default()
        };
        self.node_client.clone().tx_allocate(request).await.expect("room");
    }

    /// Whether the chunks are here or not, nobody attends them elsewhere.
    async fn here(&self, reuse: &Reuse, ask: &Ask) -> Answered {
        self.reserve(reuse, ask, 0).await;
        let chunks = reuse.wire(|_| Vec::new());
        let events = self.call_with(ask, v1::Phase::Full, Vec::new(), chunks).await.expect("taken");
        Answered::of(events, async || ()).await.expect("an answer")
    }

    /// All of them, or those that `pinned` says, are attended by `holder`; `meanwhile` comes after the first
    /// token.
    async fn there(
        &self,
        holder: &Host,
        (reuse, ask): (&Reuse, &Ask),
        pinned: impl Fn(usize) -> bool,
        meanwhile: impl AsyncFnOnce(),
    ) -> Answered {
        let share = |chunk: usize| reuse.alone(ask.serial * 100 + chunk as u64, chunk);
        let routed: Vec<usize> = (0..reuse.chunks.len()).filter(|&chunk| pinned(chunk)).collect();
        for &chunk in &routed {
            holder.pin_chunk(&share(chunk)).await;
        }
        let elsewhere: usize = routed.iter().map(|&chunk| reuse.chunks[chunk].len()).sum();
        self.reserve(reuse, ask, elsewhere as u32).await;
        let chunks = reuse.wire(|chunk| {
            let span = v1::RoutedSpan {
                node_address: holder.node.address().to_string(),
                tx: Some(share(chunk).tx()),
                lease_ms: LEASE_MS,
                first_block: 0,
                blocks: (reuse.chunks[chunk].len() / BLOCK) as u32,
            };
            if pinned(chunk) { vec![span] } else { Vec::new() }
        });
        let events = self.call_with(ask, v1::Phase::Full, Vec::new(), chunks).await.expect("taken");
        Answered::of(events, meanwhile).await.expect("an answer")
    }

    async fn pin_chunk(&self, alone: &Ask) {
        let keys = keys::chain(self.namespace, &alone.prompt, BLOCK);
        let request = v1::TxAllocateRequest {
            tx: Some(alone.tx()),
            side: v1::Side::Source.into(),
            namespace: self.namespace.0.to_vec(),
            keys: BlockKey::concat(&keys),
            prompt_tokens: alone.prompt.len() as u32,
            lease_ms: LEASE_MS,
            ..v1::TxAllocateRequest::default()
        };
        let reply = self.node_client.clone().tx_allocate(request).await.expect("pinned");
        assert_eq!(reply.into_inner().cached_blocks as usize, keys.len(), "it was computed here");
    }

    async fn abort_chunk(&self, serial: u64) {
        let tx = Some(v1::TxId { conductor_incarnation: 77, serial });
        let side = v1::Side::Source.into();
        let request = v1::TxAbortRequest { tx, side, reason: "a test".into() };
        self.node_client.clone().tx_abort(request).await.expect("aborted");
    }
}

/// How many of its chunks may be elsewhere.
fn most_chunks(reuse: &Reuse) -> usize {
    reuse.chunks.len().min(kvasir_proto::ROUTED_CHUNKS_MAX)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_give_the_same_tokens_copied_attended_elsewhere_and_computed_alone() {
    let hosts: Vec<Host> = join_all((0..3).map(|_| Host::start(Role::Both))).await;
    let [knows, asks, alone] = &hosts[..] else { unreachable!("three") };
    for (serial, reuse) in (1..).zip([Reuse::one(), Reuse::several()]) {
        knows.learn(&reuse, 1000 * serial).await;
        let ask = |n: u64| reuse.ask(100 * serial + n, reuse.tokens());
        let total: usize = reuse.chunks.iter().map(Range::len).sum();
        let spliced_before = knows.metrics.prompt_tokens_spliced.get();
        let copied = knows.here(&reuse, &ask(0)).await;
        let spliced = knows.metrics.prompt_tokens_spliced.get() - spliced_before;
        assert_eq!((spliced, copied.cached as usize), (total as u64, total), "all were there");
        let computed = alone.here(&reuse, &ask(0)).await;
        assert_eq!(alone.metrics.prompt_tokens_spliced.get(), 0);
        // As many as may be elsewhere are, then every other one.
        let most = |chunk: usize| chunk < most_chunks(&reuse);
        let attended = asks.there(knows, (&reuse, &ask(1)), most, async || ()).await;
        let some = asks.there(knows, (&reuse, &ask(2)), |n| n % 2 == 0, async || ()).await;
        // Only of steps behind all that is elsewhere it is known what a token asks. The last layer computes
        // what the logits need, and chunks that are here ask nobody.
        let end = attended.finished.expect("it ended");
        let (elsewhere, here) = reuse.chunks.split_at(most_chunks(&reuse));
        let behind = reuse.prompt.len() - elsewhere.last().expect("one").end;
        let behind = (behind - here.iter().map(Range::len).sum::<usize>()) as u64;
        let layers = super::routed::LAYERS - 1;
        assert_eq!(end.routed_prompt_queries, layers * behind + 1, "{end:?}");
        let answers = [copied.tokens, computed.tokens, attended.tokens, some.tokens];
        assert!(answers.iter().all(|tokens| *tokens == answers[0]), "{answers:?}");
        assert_ne!(answers[0], reuse.greedy, "a chunk does not attend the tokens before it");
    }
    assert_eq!(asks.metrics.recalls.get(), 0);
    assert!(asks.router.metrics().query_bytes.get() > 0);
    for host in hosts {
        host.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_who_did_not_ask_for_chunks_finds_what_was_computed_behind_them() {
    let host = Host::start(Role::Both).await;
    let reuse = Reuse::one();
    host.learn(&reuse, 1).await;
    let blocks = || async {
        let listed = host.node_client.clone().list_blocks(v1::ListBlocksRequest::default()).await;
        listed.expect("listed").into_inner().blocks.len()
    };
    let before = blocks().await;
    // The answer fills blocks too.
    host.here(&reuse, &reuse.ask(10, 200)).await;
    assert_eq!(blocks().await, before, "nothing of it was committed");
    let whole = host.whole(&reuse.ask(11, reuse.tokens())).await;
    assert_eq!((whole.cached, whole.tokens), (0, reuse.greedy.clone()));
    // What is before the first chunk is as in any prompt, and nothing behind it.
    let again = host.here(&reuse, &reuse.ask(12, reuse.tokens())).await;
    let chunks: usize = reuse.chunks.iter().map(Range::len).sum();
    assert_eq!(again.cached as usize, 200 / BLOCK * BLOCK + chunks);
    assert_ne!(again.tokens, reuse.greedy);
    host.end().await;
}

/// The tokens of a long answer where nothing goes wrong, and where `fault` comes after the first token.
async fn check_fault(reuse: Reuse, deadline_ms: u32, fault: impl AsyncFnOnce(&mut Host)) {
    let alone = Host::start(Role::Both).await;
    let mut holder = Host::start(Role::Both).await;
    let asks = Host::start_with(Role::Both, deadline_ms).await;
    holder.learn(&reuse, 1).await;
    let ask = reuse.ask(10, 300);
    let expected = alone.here(&reuse, &ask).await.tokens;
    let share = |chunk: usize| reuse.alone(ask.serial * 100 + chunk as u64, chunk);
    let chunks = 0..reuse.chunks.len().min(kvasir_proto::ROUTED_CHUNKS_MAX);
    for chunk in chunks.clone() {
        holder.pin_chunk(&share(chunk)).await;
    }
    let elsewhere: usize = reuse.chunks[chunks.clone()].iter().map(Range::len).sum();
    asks.reserve(&reuse, &ask, elsewhere as u32).await;
    let node = holder.node.address().to_string();
    let wire = reuse.wire(|chunk| {
        let span = v1::RoutedSpan {
            node_address: node.clone(),
            tx: Some(share(chunk).tx()),
            lease_ms: LEASE_MS,
            first_block: 0,
            blocks: (reuse.chunks[chunk].len() / BLOCK) as u32,
        };
        if chunks.contains(&chunk) { vec![span] } else { Vec::new() }
    });
    let events = asks.call_with(&ask, v1::Phase::Full, Vec::new(), wire).await.expect("taken");
    let answered = Answered::of(events, async || fault(&mut holder).await).await;
    assert_eq!(answered.expect("an answer").tokens, expected);
    // It may have been at its end when the fault came, which a deadline of nothing is not.
    assert!(asks.metrics.recalls.get() <= 1);
    assert!(deadline_ms > 0 || asks.metrics.recalls.get() == 1);
    for host in [alone, asks, holder] {
        host.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_of_chunks_that_is_gone_in_mid_answer_costs_time_and_no_token() {
    let gone = async |holder: &mut Host| holder.node.shut_down().await;
    check_fault(Reuse::one(), 600_000, gone).await;
    check_fault(Reuse::several(), 600_000, gone).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_of_a_chunk_that_is_lost_in_mid_answer_costs_time_and_no_token() {
    let lost = async |holder: &mut Host| holder.abort_chunk(1000).await;
    check_fault(Reuse::one(), 600_000, lost).await;
    check_fault(Reuse::several(), 600_000, lost).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partials_of_chunks_that_are_late_are_done_without() {
    check_fault(Reuse::one(), 0, async |_| ()).await;
    check_fault(Reuse::several(), 0, async |_| ()).await;
}
