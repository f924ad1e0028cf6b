//! Connections to one server. Whoever asks on one drives it, in the task that passes the answer on.
//!
//! hyper's pooled client drives each connection in a task of its own, which hands over one piece of an answer at a
//! time: two switches of tasks, and a write to the client, for each event. Here all pieces that are there are
//! taken in one go.
//!
//! A connection that nobody uses is driven by nobody: whether its server has closed it is seen when it is taken.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::http::{HeaderValue, Request, Response, StatusCode, header};
use bytes::Bytes;
use http_body::Body;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Connection, SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, timeout};

const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// Servers in Python close connections that are idle for 5 seconds.
const IDLE_MAX: Duration = Duration::from_secs(4);

/// Where a server is, and the connections to it that nobody uses. The latest is taken first, and what stays at
/// the bottom is closed.
#[derive(Debug)]
pub(super) struct Upstream {
    host: String,
    port: u16,
    authority: HeaderValue,
    idle: Mutex<Vec<Idle>>,
}

#[derive(Debug)]
struct Idle {
    line: Line,
    since: Instant,
}

type Driven = Connection<TokioIo<TcpStream>, Full<Bytes>>;

/// A connection.
#[derive(Debug)]
struct Line {
    sender: SendRequest<Full<Bytes>>,
    /// Absent once it is over.
    connection: Option<Pin<Box<Driven>>>,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    /// Nothing was sent.
    #[error("cannot reach the backend: {0}")]
    Unreached(#[from] io::Error),
    #[error("the connection to the backend failed: {0}")]
    BrokeOff(#[from] hyper::Error),
}

impl Upstream {
    /// `host` is a name or an address, an IPv6 one without brackets.
    pub(super) fn new(host: String, port: u16, authority: HeaderValue) -> Upstream {
        Upstream { host, port, authority, idle: Mutex::default() }
    }

    /// Sends a request, whose URI is a path, and waits for the head of the answer. Dropped before, it closes the
    /// connection.
    ///
    /// # Errors
    /// [`AskError`].
    pub(super) async fn ask(
        self: &Arc<Self>,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Response<Pieces>, AskError> {
        request.headers_mut().insert(header::HOST, self.authority.clone());
        loop {
            let idle = self.take();
            let is_used = idle.is_some();
            let mut line = match idle {
                Some(line) => line,
                None => Line::connect(&self.host, self.port).await?,
            };
            match line.ask(request).await {
                Ok(answer) => {
                    let of = |body| Pieces { body, line: Some(line), upstream: Arc::clone(self) };
                    return Ok(answer.map(of));
                }
                Err(mut failed) => match failed.take_message() {
                    // It was closed just now, and nothing of the request has gone out.
                    Some(unsent) if is_used => request = unsent,
                    _ => return Err(failed.into_error().into()),
                },
            }
        }
    }

    /// Sends a request over a new connection, which is closed after the head of the answer.
    ///
    /// # Errors
    /// [`AskError`].
    pub(super) async fn ask_once(
        &self,
        mut request: Request<Full<Bytes>>,
    ) -> Result<StatusCode, AskError> {
        request.headers_mut().insert(header::HOST, self.authority.clone());
        let mut line = Line::connect(&self.host, self.port).await?;
        let answer = line.ask(request).await.map_err(TrySendError::into_error)?;
        Ok(answer.status())
    }

    /// Closes what nobody has used for a while.
    pub(super) fn prune(&self) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|idle| idle.since.elapsed() < IDLE_MAX);
    }

    fn take(&self) -> Option<Line> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(Idle { mut line, since }) = idle.pop() {
            if since.elapsed() >= IDLE_MAX {
                idle.clear();
                return None;
            }
            line.drive(&mut Context::from_waker(Waker::noop()));
            if line.is_free() {
                return Some(line);
            }
        }
        None
    }

    fn put(&self, line: Line) {
        let idle = Idle { line, since: Instant::now() };
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(idle);
    }
}

impl Line {
    async fn connect(host: &str, port: u16) -> io::Result<Line> {
        let late = || io::Error::from(io::ErrorKind::TimedOut);
        let stream = timeout(CONNECT_WITHIN, Line::connect_any(host, port));
        let stream = stream.await.map_err(|_| late())??;
        stream.set_nodelay(true)?;
        let (sender, connection) =
            handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        Ok(Line { sender, connection: Some(Box::pin(connection)) })
    }

    /// Every address of the host has its share of the time: one that swallows everything does not use it up.
    async fn connect_any(host: &str, port: u16) -> io::Result<TcpStream> {
        let addresses: Vec<SocketAddr> = lookup_host((host, port)).await?.collect();
        let share = CONNECT_WITHIN / u32::try_from(addresses.len().max(1)).unwrap_or(u32::MAX);
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for address in addresses {
            match timeout(share, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => last = error,
                Err(_) => last = io::Error::from(io::ErrorKind::TimedOut),
            }
        }
        Err(last)
    }

    async fn ask(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, TrySendError<Request<Full<Bytes>>>> {
        let mut answer = pin!(self.sender.try_send_request(request));
        poll_fn(|cx| {
            drive(&mut self.connection, cx);
            answer.as_mut().poll(cx)
        })
        .await
    }

    fn drive(&mut self, cx: &mut Context<'_>) {
        drive(&mut self.connection, cx);
    }

    /// It is open, and waits for a request.
    fn is_free(&self) -> bool {
        self.connection.is_some() && self.sender.is_ready()
    }
}

/// What becomes of it, its request and its answer are told.
fn drive(connection: &mut Option<Pin<Box<Driven>>>, cx: &mut Context<'_>) {
    if let Some(open) = connection
        && open.as_mut().poll(cx).is_ready()
    {
        *connection = None;
    }
}

/// The body of an answer. Read to its end, its connection is for others; dropped before, that is closed.
#[derive(Debug)]
pub(super) struct Pieces {
    body: Incoming,
    /// Absent after the end.
    line: Option<Line>,
    upstream: Arc<Upstream>,
}

impl Pieces {
    /// What the server says it has in all, if it does.
    pub(super) fn length(&self) -> Option<u64> {
        self.body.size_hint().exact()
    }

    /// The next piece, if one is there. `None` at the end.
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Bytes>>> {
        loop {
            let mut frame = Pin::new(&mut self.body).poll_frame(cx);
            if frame.is_pending()
                && let Some(line) = &mut self.line
            {
                line.drive(cx);
                frame = Pin::new(&mut self.body).poll_frame(cx);
            }
            match std::task::ready!(frame) {
                // Trailers are of no use here.
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if !data.is_empty() => return Poll::Ready(Some(Ok(data))),
                    Ok(_) | Err(_) => {}
                },
                Some(Err(error)) => {
                    self.line = None;
                    return Poll::Ready(Some(Err(error)));
                }
                None => {
                    self.give_back(cx);
                    return Poll::Ready(None);
                }
            }
        }
    }

    fn give_back(&mut self, cx: &mut Context<'_>) {
        if let Some(mut line) = self.line.take() {
            // So that it sees that the answer is over.
            line.drive(cx);
            if line.is_free() {
                self.upstream.put(line);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    const EVENTS: [&str; 3] = ["data: 1\n\n", "data: 2\n\n", "data: 3\n\n"];

    fn upstream(address: SocketAddr) -> Arc<Upstream> {
        let authority = HeaderValue::from_static("server");
        Arc::new(Upstream::new(address.ip().to_string(), address.port(), authority))
    }

    async fn ask(upstream: &Arc<Upstream>) -> Response<Pieces> {
        let request = Request::post("/v1/completions").body(Full::from("{}")).expect("a request");
        upstream.ask(request).await.expect("an answer")
    }

    async fn read(mut answer: Response<Pieces>) -> Vec<u8> {
        let mut read = Vec::new();
        while let Some(piece) = poll_fn(|cx| answer.body_mut().poll_next(cx)).await {
            read.extend_from_slice(&piece.expect("a piece"));
        }
        read
    }

    /// A head, without waiting for more than what it says.
    async fn read_request(stream: &mut TcpStream) {
        let mut read = Vec::new();
        while !read.ends_with(b"\r\n\r\n{}") {
            assert_ne!(stream.read_buf(&mut read).await.expect("reads"), 0, "a whole request");
        }
    }

    async fn write_answer(stream: &mut TcpStream) {
        let mut answer = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_owned();
        for event in EVENTS {
            answer += &format!("{:x}\r\n{event}\r\n", event.len());
        }
        answer += "0\r\n\r\n";
        stream.write_all(answer.as_bytes()).await.expect("writes");
    }

    #[tokio::test]
    async fn a_connection_serves_one_request_after_the_other_and_is_made_anew_when_the_server_has_closed_it()
     {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let upstream = upstream(listener.local_addr().expect("an address"));
        let server = tokio::spawn(async move {
            for answers in [2, 1] {
                let (mut stream, _) = listener.accept().await.expect("a connection");
                for _ in 0..answers {
                    read_request(&mut stream).await;
                    write_answer(&mut stream).await;
                }
            }
        });
        for _ in 0..2 {
            assert_eq!(read(ask(&upstream).await).await, EVENTS.concat().as_bytes());
        }
        // The first connection is closed by now, or is while it is asked.
        assert_eq!(read(ask(&upstream).await).await, EVENTS.concat().as_bytes());
        server.await.expect("two connections, and no more");
    }

    #[tokio::test]
    async fn an_answer_that_is_not_read_to_its_end_closes_its_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let upstream = upstream(listener.local_addr().expect("an address"));
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            read_request(&mut stream).await;
            let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n1\r\n";
            stream.write_all(head).await.expect("writes");
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).await.map(|_| rest)
        });
        let mut answer = ask(&upstream).await;
        let first = poll_fn(|cx| answer.body_mut().poll_next(cx)).await;
        assert_eq!(&first.expect("a piece").expect("no error")[..], b"1");
        drop(answer);
        assert!(server.await.expect("no panic").is_ok_and(|rest| rest.is_empty()));
    }

    #[tokio::test]
    async fn a_single_request_has_a_new_connection_and_does_not_wait_for_the_body() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let upstream = upstream(listener.local_addr().expect("an address"));
        let server = tokio::spawn(async move {
            for status in ["200 OK", "503 No"] {
                let (mut stream, _) = listener.accept().await.expect("a connection");
                read_request(&mut stream).await;
                let head = format!("HTTP/1.1 {status}\r\ncontent-length: 9\r\n\r\n");
                stream.write_all(head.as_bytes()).await.expect("writes");
                assert_eq!(stream.read(&mut [0]).await.expect("reads"), 0, "it is closed");
            }
        });
        for status in [StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE] {
            let request = Request::post("/v1/models").body(Full::from("{}")).expect("a request");
            assert_eq!(upstream.ask_once(request).await.expect("a head"), status);
        }
        server.await.expect("two connections");
    }

    #[tokio::test]
    async fn pieces_that_are_there_are_taken_in_one_go() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let upstream = upstream(listener.local_addr().expect("an address"));
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            read_request(&mut stream).await;
            write_answer(&mut stream).await;
            stream
        });
        let mut answer = ask(&upstream).await;
        let _stream = server.await.expect("no panic");
        let mut cx = Context::from_waker(Waker::noop());
        let mut taken = 0;
        // All was written at once, and so is there with the head.
        while let Poll::Ready(Some(piece)) = answer.body_mut().poll_next(&mut cx) {
            piece.expect("a piece");
            taken += 1;
        }
        assert_eq!(taken, EVENTS.len());
    }
}
