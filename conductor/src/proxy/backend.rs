//! One server: where it is, whether it answers, and how much is under way there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use axum::http::{HeaderValue, Request, StatusCode, Uri, header};
use http_body_util::Full;
use tokio::time::timeout;

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
    /// The path of the list of models, which probes ask for.
    models: Uri,
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

/// A base URL: where a server is, and the beginning of its paths.
#[derive(Debug, PartialEq, Eq)]
struct Base<'a> {
    /// An IPv6 address has its brackets.
    host: &'a str,
    port: u16,
    /// Without a slash at its end.
    prefix: &'a str,
}

impl<'a> Base<'a> {
    /// # Errors
    /// A sentence without its subject, the URL.
    fn parse(url: &'a str) -> Result<Base<'a>, String> {
        const SHAPE: &str = "must be a base URL such as http://host:8000, without /v1";
        let parsed = url.parse::<Uri>().map_err(|error| format!("is not a URL: {error}"))?;
        if parsed.scheme_str() != Some("http") {
            return Err("must begin with http://: Kvasir does not support TLS to backends; if \
                        a backend needs it, put a proxy between them"
                .to_owned());
        }
        let rest = url.get("http://".len()..).unwrap_or_default();
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        // Brackets are part of an IPv6 address, whose colons do not begin a port.
        let host_end = authority.find(']').map_or(0, |end| end + 1);
        let (host, port) = match authority[host_end..].find(':') {
            None => (authority, Ok(80)),
            Some(colon) => {
                let (host, port) = authority.split_at(host_end + colon);
                (host, port[1..].parse())
            }
        };
        let prefix = path.trim_end_matches('/');
        match port {
            Ok(port) if !host.is_empty() && !url.contains(['?', '#', '@']) && port != 0 => {
                if prefix.ends_with("/v1") {
                    return Err("must not end with /v1".to_owned());
                }
                Ok(Base { host, port, prefix })
            }
            _ => Err(SHAPE.to_owned()),
        }
    }
}

impl Backend {
    /// Reads the server's key, if it has one.
    ///
    /// # Errors
    /// A sentence that names the wrong setting.
    pub(super) fn load(config: &BackendConfig) -> Result<Backend, String> {
        let BackendConfig { model, url, upstream_model, api_key_file, running_requests_max } =
            config;
        let wrong = |why: &str| format!("`backends`: the url {url:?} of model {model:?} {why}");
        let Base { host, port, prefix } = Base::parse(url).map_err(|why| wrong(&why))?;
        let uri = |path: &str| {
            let parsed = format!("{prefix}{path}").parse::<Uri>();
            parsed.map_err(|error| wrong(&format!("is not a URL: {error}")))
        };
        let uris = Endpoint::ALL.into_iter().map(|endpoint| uri(endpoint.path()));
        let uris = uris.collect::<Result<Vec<Uri>, String>>()?;
        let models = uri("/v1/models")?;
        let authority = HeaderValue::from_str(&format!("{host}:{port}"));
        let authority = authority.map_err(|error| wrong(&format!("is not a URL: {error}")))?;
        let address = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let authorization = api_key_file.as_ref().map(|file| {
            let said = |why: String| {
                format!("`backends`: cannot use the key file {}: {why}", file.display())
            };
            let key = std::fs::read_to_string(file).map_err(|error| said(error.to_string()))?;
            let mut value =
                HeaderValue::from_str(&format!("Bearer {}", key.trim())).map_err(|_| {
                    said("it contains characters that a header must not contain".to_owned())
                })?;
            value.set_sensitive(true);
            Ok::<_, String>(value)
        });
        Ok(Backend {
            url: url.trim_end_matches('/').to_owned(),
            uris,
            models,
            upstream: Arc::new(Upstream::new(address, port, authority)),
            model: upstream_model.clone().unwrap_or_else(|| model.clone()),
            authorization: authorization.transpose()?,
            running_max: *running_requests_max,
            running: AtomicUsize::new(0),
            alive: AtomicBool::new(false),
        })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn model(&self) -> &str {
        &self.model
    }

    pub(super) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.running.load(Ordering::Relaxed)
    }

    /// The most that may be under way.
    pub(super) fn in_flight_max(&self) -> usize {
        self.running_max
    }

    /// It could not be reached: it is not asked before it has answered again.
    pub(super) fn lost(&self) {
        self.set_alive(false);
    }

    /// A place for one more, if there is room.
    pub(super) fn begin(self: &Arc<Self>) -> Option<Flight> {
        let more = |running| (running < self.running_max).then_some(running + 1);
        self.running.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Flight { backend: Arc::clone(self) })
    }

    /// Where an endpoint is, as a path.
    pub(super) fn uri(&self, endpoint: Endpoint) -> &Uri {
        &self.uris[endpoint as usize]
    }

    pub(super) fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }

    /// The server's own key, whatever key the client had.
    pub(super) fn authorization(&self) -> Option<&HeaderValue> {
        self.authorization.as_ref()
    }

    /// Asks the server for its models, over a new connection: the server must accept one. Any answer but a server
    /// error marks it as alive.
    pub(super) async fn probe(&self) {
        self.upstream.prune();
        let status = timeout(PROBE_WITHIN, self.status()).await;
        self.set_alive(status.is_ok_and(|status| status.is_some_and(|it| !it.is_server_error())));
    }

    /// The status of the list of models. `None` if the server cannot be reached or breaks off.
    async fn status(&self) -> Option<StatusCode> {
        let mut request = Request::get(self.models.clone());
        if let Some(key) = &self.authorization {
            request = request.header(header::AUTHORIZATION, key);
        }
        self.upstream.ask_once(request.body(Full::default()).ok()?).await.ok()
    }

    fn set_alive(&self, alive: bool) {
        if self.alive.swap(alive, Ordering::Relaxed) != alive {
            let said = if alive { "is healthy" } else { "is unhealthy" };
            tracing::info!(url = self.url, model = self.model, "a backend {said}");
        }
    }
}

impl Flight {
    pub(super) fn backend(&self) -> &Backend {
        &self.backend
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.backend.running.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_is_a_host_a_port_and_a_prefix() {
        let check = |url, host, port, prefix| {
            assert_eq!(Base::parse(url), Ok(Base { host, port, prefix }), "{url}");
        };
        check("http://host:8000", "host", 8000, "");
        check("http://host", "host", 80, "");
        check("http://host/", "host", 80, "");
        check("http://host:8000/below/it/", "host", 8000, "/below/it");
        check("http://[::1]:8000", "[::1]", 8000, "");
        check("http://[::1]/x", "[::1]", 80, "/x");
        check("HTTP://10.0.0.1:1", "10.0.0.1", 1, "");
    }

    #[test]
    fn a_url_that_is_no_base_is_refused_with_the_reason() {
        let check = |url: &str, why: &str| {
            let refused = Base::parse(url).expect_err(url);
            assert!(refused.contains(why), "{url}: {refused}");
        };
        check("https://host", "must begin with http://");
        check("host:8000", "must begin with http://");
        check("/v2", "must begin with http://");
        check("http://host/v1", "must not end with /v1");
        check("http://host:8000/v1/", "must not end with /v1");
        for url in [
            "http://host:99999",
            "http://host:0",
            "http://host:",
            "http://user:secret@host",
            "http://host?a=b",
            "http://host/#part",
        ] {
            check(url, "must be a base");
        }
        for url in ["", "http://", "http://a b", "http://hôst", "http://[::1"] {
            check(url, "is not a URL");
        }
    }
}
