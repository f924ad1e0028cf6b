//! How requests to an object store are sent: HTTP/1.1 over TCP, or over TLS with the authorities that the operator
//! or the host names. The library of object stores brings a client of its own, which brings another TLS; this
//! one uses what the rest of the program uses.

use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService,
};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tower::Service;

/// Where hosts have the certificates of the authorities they trust.
const HOST_AUTHORITIES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];
/// A connection that nobody used for so long is closed.
const IDLE: Duration = Duration::from_secs(30);

/// What makes clients of an object store.
#[derive(Debug, Clone)]
pub(super) struct Connector {
    tls: Option<Arc<rustls::ClientConfig>>,
    connections_max: usize,
}

impl Connector {
    /// For an endpoint over TLS, whose authority is of this file or the host's.
    ///
    /// # Errors
    /// A sentence, when there are no certificates.
    pub(super) fn tls(authority: Option<PathBuf>, connections_max: usize) -> Result<Self, String> {
        let of_host = || HOST_AUTHORITIES.iter().map(PathBuf::from).find(|path| path.exists());
        let path = authority
            .or_else(of_host)
            .ok_or("this host has no CA certificates: set `object_store.ca_file`")?;
        let wrong =
            |why: String| format!("cannot use the CA certificates in {}: {why}", path.display());
        let mut roots = RootCertStore::empty();
        let certificates =
            CertificateDer::pem_file_iter(&path).map_err(|error| wrong(error.to_string()))?;
        // One that cannot be read does not spoil the others of a host.
        let (added, _) = roots.add_parsable_certificates(certificates.filter_map(Result::ok));
        if added == 0 {
            return Err(wrong("the file contains no certificate".into()));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(error.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Connector { tls: Some(Arc::new(config)), connections_max })
    }

    /// For an endpoint without TLS.
    pub(super) fn plain(connections_max: usize) -> Self {
        Connector { tls: None, connections_max }
    }
}

impl HttpConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE)
            .pool_timer(TokioTimer::new())
            .pool_max_idle_per_host(self.connections_max)
            .build(Dial { tls: self.tls.clone() });
        Ok(HttpClient::new(Sender { client }))
    }
}

#[derive(Debug)]
struct Sender {
    client: Client<Dial, HttpRequestBody>,
}

#[tonic::async_trait]
impl HttpService for Sender {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let failed = |error: Error| {
            let kind =
                if error.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Request };
            HttpError::new(kind, error)
        };
        let response = self.client.request(request).await.map_err(failed)?;
        let (parts, body) = response.into_parts();
        let broken = |error| HttpError::new(HttpErrorKind::Interrupted, error);
        let body = http_body_util::BodyExt::map_err(body, broken);
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)))
    }
}

/// Makes connections.
#[derive(Debug, Clone)]
struct Dial {
    tls: Option<Arc<rustls::ClientConfig>>,
}

impl Service<Uri> for Dial {
    type Response = TokioIo<Wire>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<Wire>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let tls = self.tls.clone();
        Box::pin(async move {
            let wrong = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why);
            let host = uri.host().ok_or_else(|| wrong("the address has no host"))?;
            // As it stands in a URI.
            let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
            let is_tls = uri.scheme_str() == Some("https");
            let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
            let stream = TcpStream::connect((host.as_str(), port)).await?;
            stream.set_nodelay(true)?;
            if !is_tls {
                return Ok(TokioIo::new(Wire(Box::new(stream))));
            }
            let tls = tls.ok_or_else(|| wrong("TLS is not configured for this endpoint"))?;
            let name = ServerName::try_from(host)
                .map_err(|_| wrong("the host is not a valid TLS server name"))?;
            let stream = TlsConnector::from(tls).connect(name, stream).await?;
            Ok(TokioIo::new(Wire(Box::new(stream))))
        })
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A connection of either kind.
struct Wire(Box<dyn Stream>);

impl Connection for Wire {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
