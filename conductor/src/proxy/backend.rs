//! One server: where it is, whether it answers, and how much is under way there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use axum::http::{HeaderValue, Uri, header};

use super::forward::Endpoint;
use super::upstream::Upstream;
use crate::config::BackendConfig;

const PROBE_WITHIN: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Debug)]
pub(super) struct Backend {
    /// Without a slash at its end.
    url: String,
    /// The paths of all endpoints there, in the order of [`Endpoint::ALL`].
    uris: Vec<Uri>,
    upstream: Arc<Upstream>,
    /// What the server calls the model.
    model: String,
    /// "Bearer …", where the server asks for it.
    authorization: Option<HeaderValue>,
    running_max: usize,
    running: AtomicUsize,
    alive: AtomicBool,
}

/// A request under way at a server, until it is dropped.
#[derive(Debug)]
pub(super) struct Flight {
    backend: Arc<Backend>,
}

impl Backend {
    pub fn load(config: &BackendConfig) -> Result<Backend, String> {
        let BackendConfig { model, url, upstream_model, api_key_file, requests_running_max } =
            config;
        let wrong = |why: &str| format!("`backends`: the url {url:?} of model {model:?} {why}");
        let parsed =
            reqwest::Url::parse(url).map_err(|error| wrong(&format!("is wrong: {error}")))?;
        if parsed.scheme() != "http" {
            return Err(wrong(
                "must begin with http://: servers that speak TLS alone need a proxy beside them",
            ));
        }
        let is_base = parsed.query().is_none()
            && parsed.fragment().is_none()
            && parsed.username().is_empty()
            && parsed.password().is_none();
        let (true, Some(host), Some(port)) =
            (is_base, parsed.host_str(), parsed.port_or_known_default())
        else {
            return Err(wrong("must be a base as in http://host:8000, without /v1"));
        };
        if parsed.path().trim_end_matches('/').ends_with("/v1") {
            return Err(wrong("must be given without /v1"));
        }
        let prefix = parsed.path().trim_end_matches('/');
        let uri = |endpoint: Endpoint| format!("{prefix}{}", endpoint.path()).parse();
        let uris = Endpoint::ALL.into_iter().map(uri).collect::<Result<Vec<Uri>, _>>();
        let uris = uris.map_err(|error| wrong(&format!("is wrong: {error}")))?;
        let authority = HeaderValue::from_str(&format!("{host}:{port}"));
        let authority = authority.map_err(|error| wrong(&format!("is wrong: {error}")))?;
        let address = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let authorization = api_key_file.as_ref().map(|file| {
            let said = |why: String| format!("`backends`: the key in {}: {why}", file.display());
            let key = std::fs::read_to_string(file).map_err(|error| said(error.to_string()))?;
            let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim()))
                .map_err(|_| said("it has characters that no header can have".to_owned()))?;
            value.set_sensitive(true);
            Ok::<_, String>(value)
        });
        Ok(Backend {
            url: url.trim_end_matches('/').to_owned(),
            uris,
            upstream: Arc::new(Upstream::new(address, port, authority)),
            model: upstream_model.clone().unwrap_or_else(|| model.clone()),
            authorization: authorization.transpose()?,
            running_max: *requests_running_max,
            running: AtomicUsize::new(0),
            alive: AtomicBool::new(false),
        })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn model(&self) -> &str {
        &self.model
    }

    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }

    pub fn in_flight(&self) -> usize {
        self.running.load(Ordering::Relaxed)
    }

    /// The most that may be under way.
    pub fn in_flight_max(&self) -> usize {
        self.running_max
    }

    /// It could not be reached: it is not asked before it has answered again.
    pub fn lost(&self) {
        self.set_alive(false);
    }

    /// A place for one more, if there is room.
    pub fn begin(self: &Arc<Self>) -> Option<Flight> {
        let more = |running| (running < self.running_max).then_some(running + 1);
        self.running.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Flight { backend: Arc::clone(self) })
    }

    /// Where an endpoint is, as a path.
    pub fn uri(&self, endpoint: Endpoint) -> &Uri {
        &self.uris[endpoint as usize]
    }

    pub fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }

    /// The server's own key, whatever key the client had.
    pub fn authorization(&self) -> Option<&HeaderValue> {
        self.authorization.as_ref()
    }

    /// It is alive when it answers, be it that it refuses.
    pub async fn probe(&self, client: &reqwest::Client) {
        self.upstream.prune();
        let mut request = client.get(format!("{}/v1/models", self.url)).timeout(PROBE_WITHIN);
        if let Some(key) = &self.authorization {
            request = request.header(header::AUTHORIZATION, key);
        }
        let answer = request.send().await;
        self.set_alive(answer.is_ok_and(|answer| !answer.status().is_server_error()));
    }

    fn set_alive(&self, alive: bool) {
        if self.alive.swap(alive, Ordering::Relaxed) != alive {
            let said = if alive { "answers" } else { "does not answer" };
            tracing::info!(url = self.url, model = self.model, "a back end {said}");
        }
    }
}

impl Flight {
    pub fn backend(&self) -> &Backend {
        &self.backend
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.backend.running.fetch_sub(1, Ordering::Relaxed);
    }
}
