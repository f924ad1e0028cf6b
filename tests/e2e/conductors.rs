//! Two conductors serve one cluster, and one of them is killed under load and started again. Nobody
//! else notices, and once it says that it is ready it knows again where everything is.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use crate::support::answers::{cached_tokens, reusable_tokens};
use crate::support::cluster::Cluster;
use crate::support::second::Second;
use crate::support::vectors::{BLOCK_TOKENS, Variant};
use futures::future::join_all;
use serde_json::{Value, json};

/// Where a prompt is computed decides what of it is found, so there is a choice of three.
const FLAGS: &str = "--prefill 3 --decode 1 --prefill-chunk-tokens 64 --dram-bytes 192MiB \
                     --ttft-objective-ms 600000 --tbt-objective-ms 600000";
/// Of each conductor.
const ASKERS: usize = 2;
/// What prompts have in common, and what each has of its own.
const COMMON_TOKENS: usize = 12 * BLOCK_TOKENS;
const OWN_TOKENS: usize = 20;
const FAMILIES: u32 = 3;
/// Prompts that are asked twice: once to have them cached on one node, and then whether they are found.
const PROBES: u32 = 10;
/// What the share of cached tokens may be lower by than it was. A probe that finds nothing takes 0.1, and
/// a conductor that knew nothing would miss two of three; one may go elsewhere because its node is busy.
const TOLERANCE: f64 = 0.25;
/// From when the process answers until it is warm, and what a machine that does other things too may add.
const WARM_WITHIN: Duration = Duration::from_secs(2);
const LATE: Duration = Duration::from_secs(10);
/// Requests that are looked at before and after.
const WINDOW: usize = 8;
/// A bound for a broken system, not something that is measured.
const PATIENCE: Duration = Duration::from_secs(120);

/// One that was answered.
#[derive(Debug, Clone, Copy)]
struct Answered {
    began: Instant,
    cached_tokens: usize,
    prompt_tokens: usize,
}

/// What one conductor's askers saw.
#[derive(Debug, Default)]
struct Seen {
    answered: RefCell<Vec<Answered>>,
    /// When those began that ended without an answer.
    broken: RefCell<Vec<Instant>>,
    /// Those that found nobody who listens.
    refused: Cell<usize>,
    under_way: Cell<usize>,
}

impl Seen {
    fn answers(&self) -> usize {
        self.answered.borrow().len()
    }

    /// Those that began at this time or later.
    fn since(&self, time: Instant) -> Vec<Answered> {
        self.answered.borrow().iter().filter(|answered| answered.began >= time).copied().collect()
    }
}

/// Of what could be found in the cache, how much was.
fn share(answered: &[Answered]) -> f64 {
    let cached: usize = answered.iter().map(|one| one.cached_tokens).sum();
    let all: usize = answered.iter().map(|one| reusable_tokens(one.prompt_tokens)).sum();
    cached as f64 / all as f64
}

struct World {
    cluster: Cluster,
    model: String,
    /// Every request has a connection of its own, so that none is sent to a process that was there before.
    client: reqwest::Client,
    longest: Vec<u32>,
    ends: Cell<bool>,
}

impl World {
    async fn start() -> World {
        let cluster = Cluster::start(FLAGS).await;
        let client = reqwest::Client::builder().pool_max_idle_per_host(0).build();
        World {
            model: cluster.model.clone(),
            cluster,
            client: client.expect("a client can be made"),
            longest: Variant::Plain.longest().prompt,
            ends: Cell::new(false),
        }
    }

    /// Two of one kind have their first blocks in common, and two with another `own` no more than those.
    fn prompt(&self, kind: u32, own: u32) -> Vec<u32> {
        let mut prompt = self.longest[..COMMON_TOKENS + OWN_TOKENS].to_vec();
        prompt[1] = 5 + kind;
        (prompt[COMMON_TOKENS], prompt[COMMON_TOKENS + 1]) = (5 + own % 500, 5 + own / 500);
        prompt
    }

    /// `Err` when there is no answer; any other than a right one is a failure of the test.
    async fn ask(&self, url: &str, prompt: &[u32]) -> Result<Answered, reqwest::Error> {
        let body = json!({
            "model": self.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": true,
        });
        let began = Instant::now();
        let reply = self.client.post(format!("{url}/v1/completions")).json(&body).send().await?;
        let (status, answer) = (reply.status(), reply.json::<Value>().await?);
        assert_eq!(status, 200, "{answer}");
        let cached_tokens = cached_tokens(&answer);
        Ok(Answered { began, cached_tokens, prompt_tokens: prompt.len() })
    }

    /// One after the other; these are not under way when anything is killed.
    async fn ask_probes(&self, url: &str, kinds: std::ops::Range<u32>) -> Vec<Answered> {
        let mut answered = Vec::new();
        for kind in kinds {
            let one = self.ask(url, &self.prompt(kind, 0)).await;
            answered.push(one.expect("an answer"));
        }
        answered
    }

    /// Asks as a client behind a load balancer does: of a conductor that is away or not ready nothing.
    async fn asks(&self, url: &str, seen: &Seen, asker: usize) {
        let ready = format!("{url}/readyz");
        for at in 0.. {
            if self.ends.get() {
                break;
            }
            let own = u32::try_from(at * ASKERS + asker).expect("a few");
            seen.under_way.set(seen.under_way.get() + 1);
            let began = Instant::now();
            let asked = self.ask(url, &self.prompt(own % FAMILIES, own)).await;
            seen.under_way.set(seen.under_way.get() - 1);
            match asked {
                Ok(answered) => seen.answered.borrow_mut().push(answered),
                Err(error) => {
                    match error.is_connect() {
                        true => seen.refused.set(seen.refused.get() + 1),
                        false => seen.broken.borrow_mut().push(began),
                    }
                    while !self.ends.get() && !self.is_ok(&ready).await {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                }
            }
        }
    }

    async fn is_ok(&self, url: &str) -> bool {
        self.client.get(url).send().await.is_ok_and(|reply| reply.status() == 200)
    }

    async fn until_ok(&self, url: &str) {
        self.until(url, async || self.is_ok(url).await).await;
    }

    async fn until(&self, what: &str, is_so: impl AsyncFn() -> bool) {
        let began = Instant::now();
        while !is_so().await {
            let logs = || self.cluster.logs();
            assert!(began.elapsed() < PATIENCE, "it did not come to {what}:\n{}", logs());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test]
#[expect(clippy::print_stdout, reason = "how long it takes is worth seeing")]
async fn one_of_two_conductors_is_killed_under_load_and_is_warm_when_it_is_ready_again() {
    let world = World::start().await;
    let mut second = Second::start(&world.cluster).await;
    let (stays, dies) = (world.cluster.url.clone(), second.url.clone());
    let (of_stays, of_dies) = (Seen::default(), Seen::default());
    // Of these the one that dies hears from the nodes alone.
    let before_kinds = FAMILIES..FAMILIES + PROBES;
    let after_kinds = before_kinds.end..before_kinds.end + PROBES;
    world.ask_probes(&stays, before_kinds.start..after_kinds.end).await;

    let kills = async {
        let enough = async || of_dies.answers() >= 2 * WINDOW && of_stays.answers() >= WINDOW;
        world.until("some load", enough).await;
        let probes_before = share(&world.ask_probes(&dies, before_kinds).await);
        let load_before = share(&of_dies.answered.borrow()[of_dies.answers() - WINDOW..]);

        world.until("requests under way", async || of_dies.under_way.get() == ASKERS).await;
        second.kill();
        let died = Instant::now();
        let answers = of_stays.answers();
        world.until("answers meanwhile", async || of_stays.answers() >= answers + WINDOW).await;

        let started = Instant::now();
        second.start_again();
        world.until_ok(&format!("{dies}/healthz")).await;
        let answers = Instant::now();
        world.until_ok(&format!("{dies}/readyz")).await;
        let ready = Instant::now();
        let probes_after = share(&world.ask_probes(&dies, after_kinds).await);
        world.until("load again", async || of_dies.since(died).len() >= WINDOW).await;
        let load_after = share(&of_dies.since(died)[..WINDOW]);
        world.ends.set(true);

        println!(
            "answers {:?} after its start, warm {:?} after that; share of cached tokens: of probes \
             {probes_before:.2}, then {probes_after:.2}; of the load {load_before:.2}, then {load_after:.2}",
            answers - started,
            ready - answers,
        );
        assert!(ready - answers < WARM_WITHIN + LATE, "warm only after {:?}", ready - answers);
        assert!(probes_before > 1.0 - TOLERANCE, "they are not found where they are");
        assert!(probes_after >= probes_before - TOLERANCE, "the first ones miss what is there");
        assert!(load_after >= load_before - TOLERANCE, "the load misses what is there");
        died
    };
    let asks = async |url: &str, seen: &Seen| {
        join_all((0..ASKERS).map(|asker| world.asks(url, seen, asker))).await;
    };
    let (died, (), ()) = tokio::join!(kills, asks(&stays, &of_stays), asks(&dies, &of_dies));

    let noticed = (of_stays.broken.take(), of_stays.refused.get());
    assert_eq!(noticed, (vec![], 0), "nobody may notice at the other one");
    let broken = of_dies.broken.take();
    println!("{} of {ASKERS} requests broke off", broken.len());
    // What the nodes said of themselves meanwhile is what was heard of them.
    let digests = "kvasir_conductor_index_digests_total";
    let compared =
        async |outcome| world.cluster.sum("conductor", digests, &[("outcome", outcome)]).await;
    assert!(compared("same").await > 0.0 && compared("differ").await == 0.0);
    assert!(broken.len() <= ASKERS && broken.iter().all(|began| *began <= died), "{broken:?}");
}
