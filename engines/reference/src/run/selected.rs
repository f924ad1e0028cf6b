//! Engines whose model selects rows, with this test in the conductor's place: the tokens are those of an
//! independent model, whoever has which rows, and whatever is lost on the way.

#[path = "../../tests/support/checkpoint.rs"]
#[allow(dead_code, reason = "made for more tests than this one")]
mod checkpoint;
#[path = "../../tests/support/naive.rs"]
#[allow(dead_code, reason = "made for more tests than this one")]
mod naive;

use futures::future::join_all;

use self::checkpoint::{IndexerSizes, Sizes, random_checkpoint};
use self::naive::{Naive, Sequence};
use super::routed::{begin, begin_behind, metric, routed, tokens};
use super::with_nodes::{Ask, BLOCK, Case, Host, file};
use crate::config::Role;

const STEPS: usize = 16;
/// Over the end of a block, and of several.
const PROMPTS: [u32; 3] = [70, 200, 290];

struct Selecting {
    dir: tempfile::TempDir,
    cases: Vec<Case>,
}

impl Selecting {
    /// A model of which no choice of rows and of tokens here is a near tie.
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let indexer = Some(IndexerSizes { heads: 8, width: 32, topk: 40 });
        let sizes = Sizes { indexer, layers: 2, dense_layers: 1, heads: 4, ..Sizes::default() };
        random_checkpoint(dir.path(), 20, &sizes, &file("configs/models/tiny-deepseek-v2"));
        let naive = Naive::load(dir.path());
        let cases = PROMPTS.iter().map(|&len| case(&naive, len)).collect();
        Selecting { dir, cases }
    }

    async fn host(&self) -> Host {
        self.host_as(Role::Both).await
    }

    async fn host_as(&self, role: Role) -> Host {
        Host::start_model(role, 600_000, self.dir.path().to_owned()).await
    }

    fn asks(&self, first_serial: u64) -> Vec<Ask> {
        let ask = |(serial, case): (u64, &Case)| Ask {
            serial,
            prompt: case.prompt.clone(),
            max_tokens: STEPS as u32,
        };
        (first_serial..).zip(&self.cases).map(ask).collect()
    }
}

fn case(naive: &Naive, len: u32) -> Case {
    let prompt: Vec<u32> = (0..len).map(|i| (i * 7919 + len * 104_729 + i * i) % 1000).collect();
    let mut sequence = Sequence::default();
    let mut logits = Vec::new();
    prompt.iter().for_each(|token| logits = naive.feed(&mut sequence, *token));
    let mut greedy = Vec::new();
    for _ in 0..STEPS {
        let (token, margin) = naive::best(&logits);
        assert!(margin > 1e-3, "a near tie of tokens: take another seed");
        greedy.push(token);
        logits = naive.feed(&mut sequence, token);
    }
    let nearest = sequence.choices.iter().copied().fold(f64::INFINITY, f64::min);
    assert!(nearest > 1e-5, "a near choice of rows, by {nearest}: take another seed");
    Case { prompt, greedy }
}

fn check(selecting: &Selecting, answers: &[Vec<u32>], what: &str) {
    for (case, tokens) in selecting.cases.iter().zip(answers) {
        assert_eq!(*tokens, case.greedy, "{what}, {} tokens", case.prompt.len());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_are_selected_wherever_they_are_and_nobody_can_tell() {
    let selecting = Selecting::new();
    let engine = selecting.host().await;
    let holders = join_all((0..4).map(|_| selecting.host())).await;
    let mut serial = 0;
    let mut asks = || {
        serial += 100;
        selecting.asks(serial)
    };
    for holder in &holders {
        let answers = join_all(asks().iter().map(async |ask| holder.whole(ask).await.tokens)).await;
        check(&selecting, &answers, "computed");
    }
    let again = join_all(asks().iter().map(async |ask| holders[0].whole(ask).await.tokens)).await;
    check(&selecting, &again, "local");
    let all: Vec<&Host> = holders.iter().collect();
    for holders in [&all[..1], &all[..]] {
        let answers = join_all(asks().iter().map(|ask| routed(&engine, holders, ask))).await;
        check(&selecting, &answers, &format!("{} holders", holders.len()));
    }
    assert_eq!(engine.metrics.recalls.get(), 0);
    for holder in &holders {
        assert!(metric(holder, "kvasir_route_query_bytes_total").await > 0, "it was asked");
        assert_eq!(metric(holder, "kvasir_store_pushed_bytes_total").await, 0);
    }
    // A part of the prefix is with the engine's own node.
    let here = join_all(asks().iter().map(async |ask| engine.whole(ask).await.tokens)).await;
    check(&selecting, &here, "computed by the engine");
    let mixed = [&engine, &holders[2]];
    let answers = join_all(asks().iter().map(|ask| routed(&engine, &mixed, ask))).await;
    check(&selecting, &answers, "mixed");
    // Or with the engine itself.
    let mut behind = 0;
    for (ask, case) in asks().iter().zip(&selecting.cases) {
        let blocks = ((ask.prompt.len() - 1) / BLOCK) as u32;
        if blocks >= 3 {
            behind += 1;
            let away = [&holders[0], &holders[3]];
            let events = begin_behind(&engine, &away, ask, 1..blocks).await;
            let answer = tokens(events, async || ()).await;
            assert_eq!(answer, case.greedy, "{} tokens, the first block here", ask.prompt.len());
        }
    }
    assert!(behind > 0, "some have three blocks");
    // And where ranks ask, each with the rows of its heads.
    let ranks = Host::start_changed(Role::Both, |_, engine| {
        engine.model_dir = selecting.dir.path().to_owned();
        engine.routes.answer_timeout_ms = 600_000;
        engine.routes.ranks = 2;
    })
    .await;
    let two = [&holders[1], &holders[2]];
    let answers = join_all(asks().iter().map(|ask| routed(&ranks, &two, ask))).await;
    check(&selecting, &answers, "two ranks");
    assert_eq!(ranks.metrics.recalls.get(), 0);
    ranks.end().await;
    assert_eq!(engine.metrics.recalls.get(), 0);
    engine.end().await;
    for holder in holders {
        holder.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_go_with_the_rows_that_are_handed_over() {
    let selecting = Selecting::new();
    let prefill = selecting.host_as(Role::Prefill).await;
    let decode = selecting.host_as(Role::Decode).await;
    let asks = selecting.asks(1);
    let answers = join_all(asks.iter().map(|ask| prefill.hand_over(&decode, ask))).await;
    check(&selecting, &answers, "handed over");
    assert_eq!(decode.metrics.computed_prompt_tokens.get(), 0);
    prefill.end().await;
    decode.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_is_lost_while_rows_are_selected_costs_time_and_no_token() {
    let selecting = Selecting::new();
    let (holder, engine) = (selecting.host().await, selecting.host().await);
    let long = Ask { max_tokens: 300, ..selecting.asks(1).remove(2) };
    let expected = holder.whole(&long).await.tokens;
    assert_eq!(expected[..STEPS], selecting.cases[2].greedy);
    let ask = Ask { serial: 2, ..long };
    let events = begin(&engine, &[&holder], &ask).await;
    let got = tokens(events, async || holder.abort_source(&ask).await).await;
    // Far from the vectors a near tie may fall either way.
    assert_eq!(got[..STEPS], expected[..STEPS]);
    // It may have been at its end when the lease was lost.
    assert!(engine.metrics.recalls.get() <= 1);
    engine.end().await;
    holder.end().await;
}
