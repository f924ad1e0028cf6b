//! A real conductor in front of the fakes, and an HTTP client.

use std::path::Path;
use std::time::Duration;

use kvasir_conductor::{Conductor, Config, ModelConfig};
use kvasir_proto::{BlockKey, keys};
use serde_json::Value;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::contract;
use super::pair::{BLOCK_TOKENS, Pair};

pub(crate) struct Harness {
    pub url: String,
    pub address: std::net::SocketAddr,
    pub grpc: std::net::SocketAddr,
    /// The base URL of what operators look at.
    pub watch: String,
    pub client: reqwest::Client,
    pub shutdown: CancellationToken,
    pub served: JoinHandle<Result<(), kvasir_conductor::Error>>,
}

/// A configuration with open ports for these nodes.
pub(crate) fn config(pairs: &[&Pair]) -> Config {
    let any = || "127.0.0.1:0".parse().expect("an address");
    let tokenizer_dir =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/models/tiny-deepseek-v2");
    Config {
        listen: any(),
        grpc_listen: any(),
        monitor_listen: any(),
        nodes: pairs.iter().map(|pair| pair.address.clone()).collect(),
        models: vec![ModelConfig { name: "tiny".to_owned(), tokenizer_dir }],
        drain_timeout_ms: 5_000,
        ..Config::default()
    }
}

/// The keys of a prompt's full blocks, as the wire has them.
pub(crate) fn prompt_keys(prompt: &[u32]) -> Vec<u8> {
    let namespace = keys::namespace(&[7; 32], "f32", "", "");
    BlockKey::concat(&keys::chain(namespace, prompt, BLOCK_TOKENS as usize))
}

/// A response that has been read to its end.
#[derive(Debug)]
pub(crate) struct Response {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub text: String,
}

impl Response {
    pub(crate) async fn read(response: reqwest::Response) -> Response {
        Response::read_from("POST", response).await
    }

    /// The answer to a request of this method, which is as the document says.
    pub(crate) async fn read_from(method: &str, response: reqwest::Response) -> Response {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let path = response.url().path().to_owned();
        let text = response.text().await.expect("a whole body");
        let kind = headers.get("content-type").map_or("", |kind| kind.to_str().expect("text"));
        contract::check(method, &path, status, kind, &text);
        Response { status, headers, text }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e} in {:?}", self.text))
    }

    /// The data of all events of a stream, without the last one.
    pub(crate) fn events(&self) -> Vec<Value> {
        let mut data: Vec<&str> = self
            .text
            .split("\n\n")
            .filter(|event| !event.is_empty())
            .map(|event| event.strip_prefix("data: ").expect("only data events"))
            .collect();
        assert_eq!(data.pop(), Some("[DONE]"), "in {:?}", self.text);
        let parse = |data: &&str| serde_json::from_str(data).expect("JSON in an event");
        data.iter().map(parse).collect()
    }
}

impl Harness {
    /// Waits until the conductor knows of the nodes.
    pub(crate) async fn start(config: Config) -> Harness {
        let harness = Harness::start_unready(config).await;
        harness.until("/readyz", |response| response.status == 200).await;
        harness
    }

    pub(crate) async fn start_unready(config: Config) -> Harness {
        let conductor = Conductor::bind(config).await.expect("binds");
        let (address, grpc) = (conductor.http_address(), conductor.engine_address());
        let watch = format!("http://{}", conductor.watch_address());
        let shutdown = CancellationToken::new();
        let served = tokio::spawn(conductor.serve(shutdown.clone()));
        let client = reqwest::Client::builder().no_proxy().build().expect("a client");
        Harness { url: format!("http://{address}"), address, grpc, watch, client, shutdown, served }
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        let request = self.client.get(format!("{}{path}", self.url));
        Response::read_from("GET", request.send().await.expect("an answer")).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Response {
        let request = self.client.delete(format!("{}{path}", self.url));
        Response::read_from("DELETE", request.send().await.expect("an answer")).await
    }

    pub(crate) async fn post(&self, path: &str, body: impl Into<reqwest::Body>) -> Response {
        Response::read(self.open(path, body).await).await
    }

    pub(crate) async fn ask(&self, path: &str, body: Value) -> Response {
        self.post(path, body.to_string()).await
    }

    /// Until the headers are there.
    pub(crate) async fn open(
        &self,
        path: &str,
        body: impl Into<reqwest::Body>,
    ) -> reqwest::Response {
        let request = self.client.post(format!("{}{path}", self.url)).body(body);
        request.send().await.expect("an answer")
    }

    /// Waits until the metric is as wanted; fails when it never is.
    pub(crate) async fn until_metric(&self, name: &str, wanted: impl Fn(f64) -> bool) {
        let mut value = 0.0;
        for _ in 0..2_000 {
            value = self.metric(name).await;
            if wanted(value) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        panic!("{name} stayed {value}");
    }

    /// Waits until a path answers as wanted; fails when it never does.
    pub(crate) async fn until(&self, path: &str, wanted: impl Fn(&Response) -> bool) {
        for _ in 0..2_000 {
            if wanted(&self.get(path).await) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        panic!("{path} never answered as wanted");
    }

    /// The value of a metric with these labels, 0 when there is none.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").await.text;
        let line = text
            .lines()
            .find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
        line.map_or(0.0, |line| {
            line.rsplit(' ').next().expect("a value").parse().expect("a number")
        })
    }
}
