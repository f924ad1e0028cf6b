//! TLS 1.3 for the tcp domain: both sides show a certificate of one authority, and whoever has none is
//! nobody. All certificates are valid for one name, whatever host they are on: peers are known by their
//! endpoints, which carry a cookie and an incarnation, and the authority says who is of the cluster.
//!
//! What arrives is decrypted and then copied to its target; only the plain domain lands in place.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvasir_mutation::{Mutation, mutated};
use rustls::client::Resumption;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
};

/// The files of one engine, in PEM.
#[derive(
    Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// This engine's certificate, and those between it and the authority.
    pub certificate: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
    /// Certificates of the authorities whose certificates are accepted.
    pub authority: PathBuf,
    /// The DNS name that every certificate of the cluster is valid for.
    pub name: String,
}

/// Why the files are of no use.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {} as PEM", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    #[error("{} contains no certificate", path.display())]
    Empty { path: PathBuf },
    #[error("`{0}` is not a DNS name")]
    Name(String),
    #[error("the certificates or the key are invalid")]
    Refused(#[from] rustls::Error),
    #[error("cannot verify peers with {}", path.display())]
    Verifier {
        path: PathBuf,
        #[source]
        source: rustls::server::VerifierBuilderError,
    },
}

/// What both ends of connections need.
#[derive(Debug)]
pub(crate) struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: ServerName<'static>,
}

impl Tls {
    pub(crate) fn load(files: &TlsFiles) -> Result<Self, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let name = ServerName::try_from(files.name.clone());
        let name = name.map_err(|_| TlsError::Name(files.name.clone()))?;
        let mut roots = RootCertStore::empty();
        for authority in certificates(&files.authority)? {
            roots.add(authority)?;
        }
        let chain = certificates(&files.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&files.key)
            .map_err(|source| TlsError::File { path: files.key.clone(), source })?;

        let client = ClientConfig::builder_with_provider(Arc::clone(&provider));
        let client =
            client.with_protocol_versions(&[&TLS13])?.with_root_certificates(roots.clone());
        let mut client = client.with_client_auth_cert(chain.clone(), key.clone_key())?;
        // Connections last, and a session that is resumed would not be verified anew.
        client.resumption = Resumption::disabled();

        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let verifier = verifier.build().map_err(|source| {
            let path = files.authority.clone();
            TlsError::Verifier { path, source }
        })?;
        let server = ServerConfig::builder_with_provider(provider);
        let server = server.with_protocol_versions(&[&TLS13])?;
        let server = match mutated(Mutation::WriterCertificateNotRequired) {
            true => server.with_no_client_auth(),
            false => server.with_client_cert_verifier(verifier),
        };
        let mut server = server.with_single_cert(chain, key)?;
        server.send_tls13_tickets = 0;
        Ok(Tls { client: Arc::new(client), server: Arc::new(server), name })
    }

    pub(super) fn connect(&self) -> Result<Connection, rustls::Error> {
        ClientConnection::new(Arc::clone(&self.client), self.name.clone()).map(Into::into)
    }

    pub(super) fn accept(&self) -> Result<Connection, rustls::Error> {
        ServerConnection::new(Arc::clone(&self.server)).map(Into::into)
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let path = || path.to_owned();
    let wrong = |source| TlsError::File { path: path(), source };
    let read = CertificateDer::pem_file_iter(path()).map_err(wrong)?;
    let certificates: Vec<_> = read.collect::<Result<_, _>>().map_err(wrong)?;
    if certificates.is_empty() {
        return Err(TlsError::Empty { path: path() });
    }
    Ok(certificates)
}
