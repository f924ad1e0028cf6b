//! TLS for the front door: TLS 1.3 by rustls, as the tcp domain of the transfer engine has it. Who
//! a client is, is said by its API key, not by a certificate.
//!
//! Certificate and key are followed: connections that are open go on with the ones they have.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use prometheus::IntCounterVec;
use rustls::ServerConfig;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::version::TLS13;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::reload::{self, ReadError, read_bounded};

const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why TLS cannot be offered with these files.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    #[error(transparent)]
    Unreadable(#[from] ReadError),
    #[error("{} does not contain a PEM certificate or key: {source}", path.display())]
    Pem { path: PathBuf, source: pem::Error },
    #[error("{} contains no certificate; write the chain as PEM, the certificate of the server first", path.display())]
    Empty { path: PathBuf },
    #[error(
        "cannot use the certificate and key: {0}; check that the key belongs to the certificate"
    )]
    Refused(#[from] rustls::Error),
}

/// Where certificate and key lie.
#[derive(Debug, Clone)]
pub(crate) struct TlsFiles {
    /// The server's certificate and those that lead to an authority, in PEM.
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// What the files held. One of them is secret.
#[derive(PartialEq, Eq)]
pub(crate) struct TlsBytes {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl fmt::Debug for TlsBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsBytes").finish_non_exhaustive()
    }
}

impl TlsFiles {
    fn read(&self) -> Result<TlsBytes, TlsError> {
        let certificate = read_bounded(&self.certificate, FILE_BYTES_MAX)?;
        let key = read_bounded(&self.key, FILE_BYTES_MAX)?;
        Ok(TlsBytes { certificate, key })
    }

    fn parse(&self, bytes: &TlsBytes) -> Result<ServerConfig, TlsError> {
        let wrong = |path: &Path, source| TlsError::Pem { path: path.to_owned(), source };
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes.certificate).collect();
        let chain = chain.map_err(|source| wrong(&self.certificate, source))?;
        if chain.is_empty() {
            return Err(TlsError::Empty { path: self.certificate.clone() });
        }
        let key = PrivateKeyDer::from_pem_slice(&bytes.key);
        let key = key.map_err(|source| wrong(&self.key, source))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider);
        let config = config.with_protocol_versions(&[&TLS13])?.with_no_client_auth();
        let mut config = config.with_single_cert(chain, key)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Tls {
    files: TlsFiles,
    /// Of a whole handshake.
    within: Duration,
    now: ArcSwap<ServerConfig>,
    /// By why they failed.
    failed: IntCounterVec,
}

impl Tls {
    /// Reads the files. Blocks.
    pub(crate) fn load(
        files: TlsFiles,
        within: Duration,
        failed: IntCounterVec,
    ) -> Result<(Tls, TlsBytes), TlsError> {
        let bytes = files.read()?;
        let now = ArcSwap::from_pointee(files.parse(&bytes)?);
        Ok((Tls { files, within, now, failed }, bytes))
    }

    /// Reads the files again every `every`, until `shutdown`.
    pub(crate) async fn follow(
        self: Arc<Self>,
        first: TlsBytes,
        every: Duration,
        reloads: reload::Counters,
        shutdown: CancellationToken,
    ) {
        let files = self.files.clone();
        let follow = reload::follow(
            reload::Followed { what: "certificate", every, counters: reloads },
            first,
            move || files.read(),
            |bytes| {
                self.now.store(Arc::new(self.files.parse(bytes)?));
                Ok(())
            },
        );
        shutdown.run_until_cancelled(follow).await;
    }

    /// Shakes hands with a client, if it does so in time.
    pub(super) async fn accept<S>(&self, stream: S) -> Option<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let acceptor = TlsAcceptor::from(self.now.load_full());
        match tokio::time::timeout(self.within, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => return Some(stream),
            Ok(Err(error)) => {
                tracing::debug!(%error, "a TLS handshake with a client failed");
                self.failed.with_label_values(&["refused"]).inc();
            }
            Err(_) => self.failed.with_label_values(&["timeout"]).inc(),
        }
        None
    }
}
