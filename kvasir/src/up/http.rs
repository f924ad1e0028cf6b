//! One GET over a plain connection, which is all that readiness needs.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const TIMEOUT: Duration = Duration::from_secs(1);
const REPLY_BYTES_MAX: u64 = 16 * 1024;

#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    pub status: u16,
    pub body: String,
}

/// None when nobody answers in time, or answers something else than HTTP.
pub async fn get(address: SocketAddr, path: &str) -> Option<Reply> {
    tokio::time::timeout(TIMEOUT, exchange(address, path)).await.ok()?
}

async fn exchange(address: SocketAddr, path: &str) -> Option<Reply> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut bytes = Vec::new();
    stream.take(REPLY_BYTES_MAX).read_to_end(&mut bytes).await.ok()?;
    parse(&String::from_utf8_lossy(&bytes))
}

fn parse(text: &str) -> Option<Reply> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    Some(Reply { status, body: body.trim().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_and_body_are_read_and_other_protocols_are_none() {
        let reply = parse("HTTP/1.1 503 Unavailable\r\na: b\r\n\r\nno decode engine\n");
        assert_eq!(reply, Some(Reply { status: 503, body: "no decode engine".into() }));
        assert_eq!(parse("SSH-2.0-x\r\n\r\n"), None);
        assert_eq!(parse("HTTP/1.1 "), None);
    }
}
