//! Clients that ask again as soon as they are answered: `load PORT CONNECTIONS SECONDS stream|whole CHARS TOKENS [KEY]`.
//!
//! Each connection sends prompts of about CHARS characters, of 50 conversations in turn, and reads each answer to
//! its end: status 200, TOKENS tokens, and nothing missing, or it counts as an error. Prints one JSON object:
//! requests per second, and p50 and p99 in microseconds of the whole answer and of its first byte.

use std::io;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const PATIENCE: Duration = Duration::from_secs(5);
const CONVERSATIONS: usize = 50;

#[derive(Clone)]
struct Load {
    port: u16,
    until: Instant,
    streams: bool,
    chars: usize,
    tokens: usize,
    key: Option<String>,
}

#[derive(Default)]
struct Seen {
    whole_us: Vec<f64>,
    first_us: Vec<f64>,
    errors: usize,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let [port, connections, seconds, how, chars, tokens, key @ ..] = given.as_slice() else {
        panic!("load PORT CONNECTIONS SECONDS stream|whole CHARS TOKENS [KEY]");
    };
    let number = |text: &String| text.parse::<usize>().expect("a number");
    let begun = Instant::now();
    let seconds: f64 = seconds.parse().expect("a number of seconds");
    let load = Load {
        port: port.parse().expect("a port"),
        until: begun + Duration::from_secs_f64(seconds),
        streams: how == "stream",
        chars: number(chars),
        tokens: number(tokens),
        key: key.first().cloned(),
    };
    let clients: Vec<_> =
        (0..number(connections)).map(|at| tokio::spawn(client(load.clone(), at))).collect();
    let mut seen = Seen::default();
    for client in clients {
        let of = client.await.expect("a client does not panic");
        seen.whole_us.extend(of.whole_us);
        seen.first_us.extend(of.first_us);
        seen.errors += of.errors;
    }
    let took_s = begun.elapsed().as_secs_f64();
    seen.whole_us.sort_by(f64::total_cmp);
    seen.first_us.sort_by(f64::total_cmp);
    println!(
        r#"{{"requests_s": {:.0}, "p50_us": {:.0}, "p99_us": {:.0}, "first_p50_us": {:.0}, "first_p99_us": {:.0}, "errors": {}}}"#,
        seen.whole_us.len() as f64 / took_s,
        quantile(&seen.whole_us, 0.5),
        quantile(&seen.whole_us, 0.99),
        quantile(&seen.first_us, 0.5),
        quantile(&seen.first_us, 0.99),
        seen.errors,
    );
}

fn quantile(sorted: &[f64], q: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * q).round() as usize).copied().unwrap_or(f64::NAN)
}

async fn client(load: Load, at: usize) -> Seen {
    let mut seen = Seen::default();
    let mut connection = None;
    let mut turn = at;
    while Instant::now() < load.until {
        let request = load.request(turn);
        turn += 1;
        let begun = Instant::now();
        match ask(&load, &mut connection, &request).await {
            Ok(first) => {
                seen.first_us.push((first - begun).as_secs_f64() * 1e6);
                seen.whole_us.push(begun.elapsed().as_secs_f64() * 1e6);
            }
            Err(error) => {
                if seen.errors == 0 {
                    eprintln!("{error}");
                }
                seen.errors += 1;
                connection = None;
            }
        }
    }
    seen
}

impl Load {
    fn request(&self, turn: usize) -> Vec<u8> {
        let conversation = (turn * 7) % CONVERSATIONS;
        let text = format!("conversation {conversation}: {}", "lorem ipsum ".repeat(self.chars / 12));
        let body = format!(
            r#"{{"model":"mock","stream":{},"max_tokens":{},"messages":[{{"role":"user","content":"{text}"}}]}}"#,
            self.streams, self.tokens
        );
        let key = self.key.as_ref().map(|key| format!("authorization: Bearer {key}\r\n"));
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{}content-length: {}\r\n\r\n",
            key.unwrap_or_default(),
            body.len()
        );
        (head + &body).into_bytes()
    }
}

/// When the first byte of the answer was there.
async fn ask(load: &Load, connection: &mut Option<TcpStream>, request: &[u8]) -> io::Result<Instant> {
    let stream = match connection {
        Some(stream) => stream,
        None => {
            let stream = TcpStream::connect(("127.0.0.1", load.port)).await?;
            stream.set_nodelay(true)?;
            connection.insert(stream)
        }
    };
    stream.write_all(request).await?;
    let mut answer = Vec::with_capacity(16 << 10);
    let mut first = None;
    while !is_whole(&answer)? {
        let read = tokio::time::timeout(PATIENCE, stream.read_buf(&mut answer)).await;
        if read.map_err(|_| io::Error::other("no answer in five seconds"))?? == 0 {
            return Err(io::Error::other("the connection ended within an answer"));
        }
        first.get_or_insert_with(Instant::now);
    }
    let wanted = if load.streams { (&b"\"delta\""[..], load.tokens) } else { (&b"tok "[..], load.tokens) };
    let got = answer.windows(wanted.0.len()).filter(|window| *window == wanted.0).count();
    let is_ended = !load.streams || position(&answer, b"[DONE]").is_some();
    if !answer.starts_with(b"HTTP/1.1 200") || got != wanted.1 || !is_ended {
        let text = String::from_utf8_lossy(&answer[..answer.len().min(400)]).into_owned();
        return Err(io::Error::other(format!("{got} tokens: {text}")));
    }
    first.ok_or_else(|| io::Error::other("an empty answer"))
}

fn is_whole(answer: &[u8]) -> io::Result<bool> {
    let Some(end) = position(answer, b"\r\n\r\n") else { return Ok(false) };
    let head = String::from_utf8_lossy(&answer[..end]).to_ascii_lowercase();
    if head.contains("transfer-encoding: chunked") {
        return Ok(answer.ends_with(b"0\r\n\r\n"));
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    let length: usize = length
        .and_then(|length| length.trim().parse().ok())
        .ok_or_else(|| io::Error::other(format!("an answer without length: {head}")))?;
    Ok(answer.len() >= end + 4 + length)
}

fn position(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len()).position(|window| window == wanted)
}
