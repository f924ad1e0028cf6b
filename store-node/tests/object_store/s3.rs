//! A small server that speaks S3: it keeps objects in memory, takes only what is rightly signed, gives lists in
//! short pages, and does wrong when it is told to.

#![allow(dead_code, reason = "the tests of the node and those of its clients use a part each")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use kvasir_store_node::config::{Keys, ObjectStore};
use ring::{digest, hmac};

pub(crate) const BUCKET: &str = "blocks";
pub(crate) const REGION: &str = "eu-test-1";
const KEY_ID: &str = "who";
const SECRET: &str = "a secret/of+somebody";
/// Objects of one page of a list.
const PAGE: usize = 3;

/// What the server does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Good,
    /// It takes requests and says nothing.
    Hangs,
    /// 500, for all.
    Fails,
    /// 403, for all.
    Refuses,
    /// 403 for what is to be deleted.
    Keeps,
    /// 404, for all: the bucket is not there.
    NoBucket,
    /// The same from the first copy on, which is made.
    NoBucketSoon,
}

#[derive(Debug)]
struct Inner {
    objects: BTreeMap<String, Bytes>,
    mode: Mode,
    /// By verb: PUT, COPY, GET, HEAD, DELETE, LIST.
    served: BTreeMap<&'static str, u64>,
    wrongly_signed: u64,
}

/// See the module.
#[derive(Clone)]
pub(crate) struct S3 {
    inner: Arc<Mutex<Inner>>,
    address: SocketAddr,
}

impl S3 {
    pub(crate) async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let inner = Inner {
            objects: BTreeMap::new(),
            mode: Mode::Good,
            served: BTreeMap::new(),
            wrongly_signed: 0,
        };
        let s3 = S3 { inner: Arc::new(Mutex::new(inner)), address };
        let router = Router::new()
            .fallback(serve)
            .layer(axum::extract::DefaultBodyLimit::disable())
            .with_state(s3.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        s3
    }

    /// Settings of a node that uses it.
    pub(crate) fn settings(&self) -> ObjectStore {
        ObjectStore {
            url: Some(format!("s3://{BUCKET}/kv/cache")),
            endpoint: Some(format!("http://{}", self.address)),
            region: REGION.into(),
            read_timeout_ms: 400,
            upload_timeout_ms: 2_000,
            list_interval_ms: 50,
            keys: Some(Keys {
                access_key_id: KEY_ID.into(),
                secret_access_key: SECRET.into(),
                session_token: None,
            }),
            ..ObjectStore::default()
        }
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.inner().mode = mode;
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.inner().objects.keys().cloned().collect()
    }

    pub(crate) fn put(&self, name: &str, bytes: impl Into<Bytes>) {
        self.inner().objects.insert(name.to_owned(), bytes.into());
    }

    pub(crate) fn get(&self, name: &str) -> Option<Bytes> {
        self.inner().objects.get(name).cloned()
    }

    pub(crate) fn remove(&self, name: &str) {
        self.inner().objects.remove(name);
    }

    pub(crate) fn served(&self, verb: &str) -> u64 {
        self.inner().served.get(verb).copied().unwrap_or(0)
    }

    pub(crate) fn wrongly_signed(&self) -> u64 {
        self.inner().wrongly_signed
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("nobody panics with it")
    }

    fn mode(&self) -> Mode {
        self.inner().mode
    }
}

async fn serve(
    State(s3): State<S3>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    while s3.mode() == Mode::Hangs {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    match s3.mode() {
        Mode::Fails => return StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Mode::Refuses => return StatusCode::FORBIDDEN.into_response(),
        Mode::NoBucket => return StatusCode::NOT_FOUND.into_response(),
        Mode::Keeps if method == Method::DELETE => return StatusCode::FORBIDDEN.into_response(),
        Mode::Good | Mode::Hangs | Mode::Keeps | Mode::NoBucketSoon => {}
    }
    let mut inner = s3.inner();
    if !is_signed(&method, &uri, &headers, &body) {
        inner.wrongly_signed += 1;
        return StatusCode::FORBIDDEN.into_response();
    }
    let path = uri.path();
    let Some(name) = path.strip_prefix(&format!("/{BUCKET}")) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let name = name.trim_start_matches('/').to_owned();
    let source = headers.get("x-amz-copy-source").and_then(|source| source.to_str().ok());
    let verb = match (&method, source) {
        (&Method::PUT, None) => "PUT",
        (&Method::PUT, Some(_)) => "COPY",
        (&Method::GET, _) if name.is_empty() => "LIST",
        (&Method::GET, _) => "GET",
        (&Method::HEAD, _) => "HEAD",
        (&Method::DELETE, _) => "DELETE",
        _ => return StatusCode::METHOD_NOT_ALLOWED.into_response(),
    };
    *inner.served.entry(verb).or_insert(0) += 1;
    match verb {
        "PUT" => {
            inner.objects.insert(name, body);
            [("etag", "\"1\"")].into_response()
        }
        "COPY" => {
            let source = source.and_then(|s| s.trim_start_matches('/').split_once('/'));
            let found = source.and_then(|(_, source)| inner.objects.get(source).cloned());
            let Some(bytes) = found else { return StatusCode::NOT_FOUND.into_response() };
            inner.objects.insert(name, bytes);
            if inner.mode == Mode::NoBucketSoon {
                inner.mode = Mode::NoBucket;
            }
            "<CopyObjectResult><ETag>\"1\"</ETag></CopyObjectResult>".into_response()
        }
        "DELETE" => {
            inner.objects.remove(&name);
            StatusCode::NO_CONTENT.into_response()
        }
        "LIST" => list(&inner, uri.query().unwrap_or_default()).into_response(),
        _ => match inner.objects.get(&name).cloned() {
            Some(bytes) => {
                let length = bytes.len().to_string();
                let headers = [
                    ("etag", "\"1\""),
                    ("last-modified", "Mon, 01 Jan 2024 00:00:00 GMT"),
                    ("content-length", &length),
                ];
                (headers, bytes).into_response()
            }
            None => StatusCode::NOT_FOUND.into_response(),
        },
    }
}

fn list(inner: &Inner, query: &str) -> String {
    let query: BTreeMap<&str, String> = pairs(query).collect();
    let prefix = query.get("prefix").cloned().unwrap_or_default();
    let after = query.get("continuation-token").cloned().unwrap_or_default();
    let mut names =
        inner.objects.iter().filter(|(name, _)| name.starts_with(&prefix) && **name > after);
    let page: Vec<_> = names.by_ref().take(PAGE).collect();
    let more = names.next().is_some();
    let mut text = format!("<ListBucketResult><IsTruncated>{more}</IsTruncated>");
    for (name, bytes) in &page {
        text += &format!(
            "<Contents><Key>{name}</Key><Size>{}</Size><ETag>\"1\"</ETag>\
             <LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>",
            bytes.len()
        );
    }
    if let (true, Some((last, _))) = (more, page.last()) {
        text += &format!("<NextContinuationToken>{last}</NextContinuationToken>");
    }
    text + "</ListBucketResult>"
}

fn pairs(query: &str) -> impl Iterator<Item = (&str, String)> {
    let pair = |pair| str::split_once(pair, '=').unwrap_or((pair, ""));
    query.split('&').filter(|text| !text.is_empty()).map(pair).map(|(k, v)| (k, decoded(v)))
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let hex = |rest: &mut dyn Iterator<Item = u8>| {
            let digits = [rest.next()?, rest.next()?];
            u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()
        };
        bytes.push(if byte == b'%' { hex(&mut rest).expect("two digits") } else { byte });
    }
    String::from_utf8(bytes).expect("UTF-8")
}

/// Whether a request has the signature that S3 would want ("AWS Signature Version 4").
fn is_signed(method: &Method, uri: &Uri, headers: &HeaderMap, body: &[u8]) -> bool {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let parts = || {
        let said = header("authorization")?.strip_prefix("AWS4-HMAC-SHA256 ")?;
        let part = |name: &str| {
            said.split(", ").find_map(|part| part.strip_prefix(name)?.strip_prefix('='))
        };
        let date = header("x-amz-date")?;
        let scope = format!("{}/{REGION}/s3/aws4_request", &date[..8]);
        if part("Credential")? != format!("{KEY_ID}/{scope}") {
            return None;
        }
        if header("x-amz-content-sha256")? != hex(digest::digest(&digest::SHA256, body).as_ref()) {
            return None;
        }
        let signed = part("SignedHeaders")?;
        let lines: Option<String> = signed
            .split(';')
            .map(|name| Some(format!("{name}:{}\n", header(name)?.trim())))
            .collect();
        let mut query: Vec<&str> =
            uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty()).collect();
        query.sort_unstable();
        let request = format!(
            "{method}\n{}\n{}\n{}\n{signed}\n{}",
            uri.path(),
            query.join("&"),
            lines?,
            header("x-amz-content-sha256")?
        );
        let request = hex(digest::digest(&digest::SHA256, request.as_bytes()).as_ref());
        let text = format!("AWS4-HMAC-SHA256\n{date}\n{scope}\n{request}");
        let sign = |key: &[u8], text: &str| {
            let key = hmac::Key::new(hmac::HMAC_SHA256, key);
            hmac::sign(&key, text.as_bytes()).as_ref().to_vec()
        };
        let key = sign(format!("AWS4{SECRET}").as_bytes(), &date[..8]);
        let key =
            [REGION, "s3", "aws4_request", &text].iter().fold(key, |key, part| sign(&key, part));
        (part("Signature")? == hex(&key)).then_some(())
    };
    parts().is_some()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
