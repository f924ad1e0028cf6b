//! A server that speaks just enough of OpenAI's protocol and costs next to nothing: `mock PORT TOKENS`.
//!
//! Every POST is answered at once with TOKENS tokens: as one JSON object, or, where the body says
//! `"stream":true`, as that many events, each written on its own, and `[DONE]`. Every GET is answered with
//! what routers ask servers for when they meet them.

use std::fmt::Write;
use std::io;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const END: &[u8] = b"\r\n\r\n";

struct Answers {
    about: Vec<u8>,
    whole: Vec<u8>,
    /// Head, events and end, in the order in which they are written.
    events: Vec<Vec<u8>>,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> io::Result<()> {
    let mut given = std::env::args().skip(1);
    let usage = "mock PORT TOKENS";
    let port: u16 = given.next().and_then(|port| port.parse().ok()).expect(usage);
    let tokens: usize = given.next().and_then(|tokens| tokens.parse().ok()).expect(usage);
    let answers = Arc::new(answers(tokens));
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    loop {
        let (client, _) = listener.accept().await?;
        client.set_nodelay(true)?;
        let answers = Arc::clone(&answers);
        // A client that goes ends its connection, and nothing else.
        tokio::spawn(async move { serve(client, &answers).await.ok() });
    }
}

fn answers(tokens: usize) -> Answers {
    let json = |body: &str| {
        let length = body.len();
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        );
        (head + body).into_bytes()
    };
    let about = r#"{"object":"list","data":[{"id":"mock","object":"model","owned_by":"x","created":1}],"status":"ok","model_path":"mock","served_model_name":"mock","is_generation":true,"max_total_num_tokens":1000000}"#;
    let text = "tok ".repeat(tokens);
    let whole = format!(
        r#"{{"id":"x","object":"chat.completion","created":1,"model":"mock","choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":10,"completion_tokens":{tokens},"total_tokens":{}}}}}"#,
        tokens + 10
    );
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut events = vec![head.as_bytes().to_vec()];
    for token in 0..tokens {
        let event = format!(
            r#"{{"id":"x","object":"chat.completion.chunk","created":1,"model":"mock","choices":[{{"index":0,"delta":{{"content":"tok{token} "}},"finish_reason":null}}]}}"#
        );
        events.push(chunk(&event));
    }
    events.push(chunk("[DONE]"));
    events.push(b"0\r\n\r\n".to_vec());
    Answers { about: json(about), whole: json(&whole), events }
}

fn chunk(data: &str) -> Vec<u8> {
    let event = format!("data: {data}\n\n");
    let mut chunk = String::new();
    write!(chunk, "{:x}\r\n{event}\r\n", event.len()).expect("a string takes it");
    chunk.into_bytes()
}

async fn serve(mut client: TcpStream, answers: &Answers) -> io::Result<()> {
    let mut read = Vec::with_capacity(64 << 10);
    loop {
        let Some((is_get, streams)) = request(&mut client, &mut read).await? else { return Ok(()) };
        if is_get {
            client.write_all(&answers.about).await?;
        } else if streams {
            for event in &answers.events {
                client.write_all(event).await?;
            }
        } else {
            client.write_all(&answers.whole).await?;
        }
    }
}

/// Takes the next request out of what is read: whether it is a GET, and whether events are wanted.
async fn request(client: &mut TcpStream, read: &mut Vec<u8>) -> io::Result<Option<(bool, bool)>> {
    let head = loop {
        if let Some(at) = position(read, END) {
            break at + END.len();
        }
        if client.read_buf(read).await? == 0 {
            return Ok(None);
        }
    };
    let text = String::from_utf8_lossy(&read[..head]).to_ascii_lowercase();
    let is_get = text.starts_with("get");
    let header = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let until = if header("transfer-encoding:") == Some("chunked") {
        loop {
            if let Some(at) = position(&read[head..], b"0\r\n\r\n") {
                break head + at + 5;
            }
            client.read_buf(read).await?;
        }
    } else {
        let length = header("content-length:").map_or(0, |length| length.parse().unwrap_or(0));
        while read.len() < head + length {
            if client.read_buf(read).await? == 0 {
                return Ok(None);
            }
        }
        head + length
    };
    let body = &read[head..until];
    let streams = [&b"\"stream\":true"[..], b"\"stream\": true"];
    let streams = streams.iter().any(|wanted| position(body, wanted).is_some());
    read.drain(..until);
    Ok(Some((is_get, streams)))
}

fn position(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len()).position(|window| window == wanted)
}
