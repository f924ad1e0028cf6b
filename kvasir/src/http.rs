//! Requests of the program to its own cluster: HTTP/1.1 without TLS, one connection a request, no proxies.

use std::io;
use std::pin::pin;
use std::time::Duration;

use futures::future::{Either, select};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::handshake;
use hyper::{Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// More than any page of a conductor or a node.
const ANSWER_BYTES_MAX: usize = 256 << 20;

/// How long a request may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub connect: Duration,
    /// From the connection to the last byte of the answer.
    pub answer: Duration,
}

/// An answer that has been read to its end.
#[derive(Debug)]
pub(crate) struct Answer {
    pub status: StatusCode,
    pub body: Bytes,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpError {
    #[error("{0:?} is not an address of the form http://host:port")]
    Address(String),
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    #[error("no answer within {} s", .0.as_secs_f64())]
    Late(Duration),
    #[error("the answer has more than {ANSWER_BYTES_MAX} bytes")]
    TooLong,
    #[error("lost the connection: {0}")]
    Broke(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the answer is not JSON: {0}")]
    Json(#[from] serde_json::Error),
}

impl Answer {
    /// The body as JSON.
    ///
    /// # Errors
    /// [`HttpError::Json`].
    pub(crate) fn json(&self) -> Result<Value, HttpError> {
        Ok(serde_json::from_slice(&self.body)?)
    }

    /// The body as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// The "host:port" of a URL of the form `http://host:port`; the port is 80 if there is none. A path is ignored.
pub(crate) fn authority(url: &str) -> Option<String> {
    let uri: hyper::Uri = url.parse().ok()?;
    if uri.scheme_str() != Some("http") {
        return None;
    }
    let (host, authority) = (uri.host()?, uri.authority()?.as_str());
    match authority.strip_prefix(host)? {
        "" => Some(format!("{host}:80")),
        port => port.strip_prefix(':')?.parse::<u16>().ok().map(|port| format!("{host}:{port}")),
    }
}

/// GET of a whole URL.
///
/// # Errors
/// [`HttpError`].
pub(crate) async fn get(url: &str, limits: Limits) -> Result<Answer, HttpError> {
    send(url, Request::get(path_of(url)), Bytes::new(), limits).await
}

/// POST of JSON to a whole URL, with further headers.
///
/// # Errors
/// [`HttpError`].
pub(crate) async fn post_json(
    url: &str,
    headers: &[(&str, &str)],
    body: &Value,
    limits: Limits,
) -> Result<Answer, HttpError> {
    let mut request = Request::post(path_of(url)).header(header::CONTENT_TYPE, "application/json");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    send(url, request, body.to_string().into(), limits).await
}

/// The path and the query of a URL.
fn path_of(url: &str) -> String {
    let uri = url.parse::<hyper::Uri>().unwrap_or_default();
    uri.path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string)
}

async fn send(
    url: &str,
    request: hyper::http::request::Builder,
    body: Bytes,
    limits: Limits,
) -> Result<Answer, HttpError> {
    let authority = authority(url).ok_or_else(|| HttpError::Address(url.to_owned()))?;
    let request = request
        .header(header::HOST, &authority)
        .header(header::CONNECTION, "close")
        .body(Full::new(body))
        .map_err(|_| HttpError::Address(url.to_owned()))?;
    let stream = timeout(limits.connect, TcpStream::connect(&authority)).await;
    let stream = stream.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let stream = stream.map_err(HttpError::Connect)?;
    stream.set_nodelay(true).map_err(HttpError::Connect)?;
    let answer = timeout(limits.answer, exchange(stream, request)).await;
    answer.unwrap_or(Err(HttpError::Late(limits.answer)))
}

async fn exchange(stream: TcpStream, request: Request<Full<Bytes>>) -> Result<Answer, HttpError> {
    let broke = |error: hyper::Error| HttpError::Broke(error.into());
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await.map_err(broke)?;
    let ask = pin!(async move {
        let (head, body) = sender.send_request(request).await.map_err(broke)?.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| match error.is::<LengthLimitError>() {
            true => HttpError::TooLong,
            false => HttpError::Broke(error),
        })?;
        Ok(Answer { status: head.status, body: body.to_bytes() })
    });
    // The connection only moves bytes: if it fails, the request fails as well.
    match select(ask, connection).await {
        Either::Left((answer, _)) => answer,
        Either::Right((_, ask)) => ask.await,
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    const SHORT: Limits =
        Limits { connect: Duration::from_secs(5), answer: Duration::from_millis(200) };
    const LIMITS: Limits =
        Limits { connect: Duration::from_secs(5), answer: Duration::from_secs(20) };

    #[test]
    fn an_authority_is_read_from_a_url() {
        let check = |url, want: Option<&str>| {
            assert_eq!(authority(url).as_deref(), want, "{url}");
        };
        check("http://127.0.0.1:8002", Some("127.0.0.1:8002"));
        check("http://host:1/a/b?c", Some("host:1"));
        check("http://host", Some("host:80"));
        check("http://[::1]:9", Some("[::1]:9"));
        for wrong in ["https://host:1", "host:1", "http://", "http://a@host:1", "http://host:x", ""]
        {
            check(wrong, None);
        }
    }

    #[test]
    fn a_path_has_its_query() {
        let check = |url, want: &str| assert_eq!(path_of(url), want, "{url}");
        check("http://host:1/a/b?c", "/a/b?c");
        check("http://host", "/");
        check("http://host?c", "/?c");
    }

    /// Answers the first request with these bytes, and returns the request.
    async fn served(bytes: &'static [u8]) -> (String, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut request = vec![0; 4096];
            let read = stream.read(&mut request).await.expect("a request");
            stream.write_all(bytes).await.expect("an answer");
            // Open until the client closes it.
            let _ = stream.read(&mut [0]).await;
            String::from_utf8_lossy(&request[..read]).into_owned()
        });
        (url, server)
    }

    #[tokio::test]
    async fn a_request_is_sent_whole_and_its_answer_is_read_whole() {
        let (url, server) =
            served(b"HTTP/1.1 503 No\r\ncontent-length: 7\r\nconnection: close\r\n\r\n{\"a\":1}")
                .await;
        let url = format!("{url}/v1/x?y=z");
        let body = serde_json::json!({"b": 2});
        let answer = post_json(&url, &[("x-id", "7")], &body, LIMITS).await.expect("an answer");
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(answer.json().expect("JSON"), serde_json::json!({"a": 1}));
        let request = server.await.expect("no panic");
        assert!(request.starts_with("POST /v1/x?y=z HTTP/1.1\r\n"), "{request}");
        assert!(request.contains("x-id: 7\r\n") && request.ends_with("{\"b\":2}"), "{request}");
    }

    #[tokio::test]
    async fn a_server_that_is_silent_absent_or_speaks_something_else_is_an_error() {
        let (url, _server) = served(b"").await;
        assert!(matches!(get(&url, SHORT).await, Err(HttpError::Late(_))));
        let (url, _server) = served(b"SSH-2.0-x\r\n\r\n").await;
        assert!(matches!(get(&url, LIMITS).await, Err(HttpError::Broke(_))));
        let (url, _server) = served(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
        let answer = get(&url, LIMITS).await.expect("an answer");
        assert!(matches!(answer.json(), Err(HttpError::Json(_))));
        let free = TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let url = format!("http://{}", free.local_addr().expect("an address"));
        drop(free);
        assert!(matches!(get(&url, LIMITS).await, Err(HttpError::Connect(_))));
        assert!(matches!(get("ftp://x", LIMITS).await, Err(HttpError::Address(_))));
    }
}
