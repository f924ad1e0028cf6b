//! The front door under TLS.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvasir_conductor::{Conductor, Config, TlsConfig};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::support::{Harness, config};

/// A certificate for "localhost" and its key, both in PEM.
struct Identity {
    certificate: String,
    key: String,
}

impl Identity {
    fn new() -> Identity {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
        let certificate = params.self_signed(&key).expect("signed").pem();
        Identity { certificate, key: key.serialize_pem() }
    }

    fn der(&self) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(self.certificate.as_bytes()).expect("PEM")
    }

    fn write(&self, folder: &Path) {
        std::fs::write(folder.join("certificate.pem"), &self.certificate).expect("writes");
        std::fs::write(folder.join("key.pem"), &self.key).expect("writes");
    }
}

fn tls(folder: &Path) -> TlsConfig {
    TlsConfig {
        certificate_file: Some(folder.join("certificate.pem")),
        key_file: Some(folder.join("key.pem")),
        ..TlsConfig::default()
    }
}

/// Connects and shakes hands, trusting these.
async fn connect(
    harness: &Harness,
    trusted: &[&Identity],
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    for one in trusted {
        roots.add(one.der()).expect("a certificate");
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let socket = TcpStream::connect(harness.address).await?;
    let name = ServerName::try_from("localhost").expect("a name");
    TlsConnector::from(Arc::new(client)).connect(name, socket).await
}

/// Asks on an open connection: the head of the answer and its body.
async fn get(stream: &mut TlsStream<TcpStream>, path: &str) -> (String, String) {
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sends");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.expect("a head"));
    }
    let head = String::from_utf8(head).expect("text").to_lowercase();
    let length = head.split("content-length: ").nth(1).expect("a length");
    let length = length.lines().next().expect("a line").parse().expect("a number");
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.expect("a body");
    (head, String::from_utf8(body).expect("text"))
}

async fn metric(harness: &Harness, trusted: &[&Identity], name: &str) -> f64 {
    let mut stream = connect(harness, trusted).await.expect("shakes hands");
    let (_, text) = get(&mut stream, "/metrics").await;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(0.0, |value| value.trim().parse().expect("a number"))
}

#[tokio::test]
async fn under_tls_whoever_trusts_the_certificate_is_answered_and_nobody_in_the_clear() {
    let folder = tempfile::tempdir().expect("a folder");
    let (identity, other) = (Identity::new(), Identity::new());
    identity.write(folder.path());
    let harness = Harness::start_unready(Config { tls: tls(folder.path()), ..config(&[]) }).await;
    let mut stream = connect(&harness, &[&identity]).await.expect("shakes hands");
    for _ in 0..2 {
        let (head, body) = get(&mut stream, "/healthz").await;
        assert!(head.starts_with("http/1.1 200"), "{head}");
        assert_eq!(body, "ok\n");
    }
    assert!(connect(&harness, &[&other]).await.is_err(), "it is not who it should be");
    let mut clear = TcpStream::connect(harness.address).await.expect("connects");
    clear.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("sends");
    let mut answer = Vec::new();
    let _ = clear.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    // An open connection is told of the end.
    harness.shutdown.cancel();
    harness.served.await.expect("no panic").expect("ends well");
    assert_eq!(stream.read(&mut [0; 1]).await.expect("a proper end"), 0);
}

#[tokio::test]
async fn handshakes_that_do_not_come_to_an_end_are_cut_off() {
    let folder = tempfile::tempdir().expect("a folder");
    let identity = Identity::new();
    identity.write(folder.path());
    let start = async |handshake_timeout_ms| {
        let tls = TlsConfig { handshake_timeout_ms, ..tls(folder.path()) };
        Harness::start_unready(Config { tls, ..config(&[]) }).await
    };
    let harness = start(50).await;
    // The first sends nothing, the second the beginning of a record that is 16 KiB long.
    for begun in [&b""[..], b"\x16\x03\x01\x40\x00\x01"] {
        let mut socket = TcpStream::connect(harness.address).await.expect("connects");
        socket.write_all(begun).await.expect("sends");
        let mut answer = [0; 16];
        let closed = tokio::time::timeout(Duration::from_secs(120), socket.read(&mut answer));
        assert!(matches!(closed.await.expect("it stays open"), Ok(0) | Err(_)), "{begun:?}");
    }
    // One that has the time says why it refuses.
    let harness = start(600_000).await;
    let mut socket = TcpStream::connect(harness.address).await.expect("connects");
    socket.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("sends");
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer).await;
    let refused = "kvasir_conductor_tls_handshake_failures_total{reason=\"refused\"}";
    assert_eq!(metric(&harness, &[&identity], refused).await, 1.0);
}

#[tokio::test]
async fn a_new_certificate_is_for_new_connections_and_open_ones_go_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let (old, new) = (Identity::new(), Identity::new());
    old.write(folder.path());
    let config = Config { tls: tls(folder.path()), reload_interval_ms: 10, ..config(&[]) };
    let harness = Harness::start_unready(config).await;
    let mut open = connect(&harness, &[&old]).await.expect("shakes hands");

    // A certificate whose key has not come yet.
    std::fs::write(folder.path().join("certificate.pem"), &new.certificate).expect("writes");
    let refused = "kvasir_conductor_reloads_total{file=\"certificate\",outcome=\"rejected\"}";
    while metric(&harness, &[&old], refused).await < 1.0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    new.write(folder.path());
    while connect(&harness, &[&new]).await.is_err() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(connect(&harness, &[&old]).await.is_err());
    assert_eq!(get(&mut open, "/healthz").await.1, "ok\n");
}

#[tokio::test]
async fn what_is_wrong_with_a_certificate_is_said_at_the_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let start = async |tls: TlsConfig| {
        let config = Config { tls, ..config(&[]) };
        Conductor::bind(config).await.expect_err("cannot start").to_string()
    };
    let half = TlsConfig { key_file: None, ..tls(folder.path()) };
    assert!(
        start(half)
            .await
            .contains("set both `tls.certificate_file` and `tls.key_file`, or neither")
    );
    let said = start(tls(folder.path())).await;
    assert!(said.contains("cannot read ") && said.contains("certificate.pem: "), "{said}");
    let (one, other) = (Identity::new(), Identity::new());
    Identity { certificate: one.certificate.clone(), key: other.key }.write(folder.path());
    let said = start(tls(folder.path())).await;
    assert!(said.contains("cannot use the certificate and key"), "{said}");
    Identity { certificate: String::new(), key: one.key.clone() }.write(folder.path());
    let said = start(tls(folder.path())).await;
    assert!(said.contains("certificate.pem contains no certificate"), "{said}");
    Identity { certificate: one.certificate, key: String::new() }.write(folder.path());
    let said = start(tls(folder.path())).await;
    assert!(said.contains("key.pem does not contain a PEM certificate or key"), "{said}");
}
