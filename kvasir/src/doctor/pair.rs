//! A probe between two hosts: one serves a region, the other writes to it and then asks what has
//! landed there.
//!
//! Both talk over a TCP connection of their own, a JSON object a line: the server says where its
//! engine is and what may be written; the other one asks for a checksum when it is done; the server
//! answers and forgets the region. One probe at a time.

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

use kvasir_transfer::{Endpoint, RegionDesc, checksum};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::probe;
use super::report::Probe;
use crate::output::{complain, say};

/// A probe that says nothing for so long is over.
const SILENCE: Duration = Duration::from_secs(30);
const LINE_BYTES_MAX: u64 = 16 << 10;
/// What is written last and compared.
const COMPARED_BYTES: usize = 1 << 20;

#[derive(Serialize, Deserialize)]
struct Offer {
    endpoint: Vec<u8>,
    region: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
struct Question {
    compared_bytes: usize,
}

#[derive(Serialize, Deserialize)]
struct Answer {
    checksum: u64,
}

/// Serves probes until the process is ended.
pub fn serve(address: SocketAddr, temporary: &Path) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(address)
        .map_err(|error| format!("cannot listen on {address}: {error}"))?;
    let address = listener.local_addr()?;
    say(&format!(
        "waiting for probes; on the other host: kvasir doctor --peer HOST:{}",
        address.port()
    ));
    loop {
        let (stream, from) = listener.accept()?;
        say(&format!("a probe from {from}"));
        match serve_one(stream, temporary) {
            Ok(()) => say(&format!("the probe from {from} is done")),
            Err(error) => complain(&format!("the probe from {from} ended early: {error}")),
        }
    }
}

fn serve_one(stream: TcpStream, temporary: &Path) -> Result<(), Box<dyn Error>> {
    let run_dir = tempfile::tempdir_in(temporary)?;
    let engine = probe::engine("probed", None, stream.local_addr()?.ip(), run_dir.path())?;
    let (region, descriptor) = probe::region(&engine)?;
    let mut line = Lines::new(stream)?;
    line.say(&Offer { endpoint: engine.endpoint().to_bytes(), region: descriptor.to_bytes() })?;
    let Question { compared_bytes } = line.hear()?;
    let mut bytes = vec![0; compared_bytes.min(probe::REGION_BYTES)];
    region.memory().copy_to(0, &mut bytes)?;
    line.say(&Answer { checksum: checksum(&bytes) })
}

/// Probes the way to a host that serves.
pub fn probe(peer: SocketAddr, temporary: &Path) -> Result<Probe, Box<dyn Error>> {
    let unreachable = |error| {
        format!("{peer} cannot be reached ({error}); does `kvasir doctor --serve` run there?")
    };
    let stream = TcpStream::connect_timeout(&peer, SILENCE).map_err(unreachable)?;
    let here = stream.local_addr()?.ip();
    let mut line = Lines::new(stream)?;
    let offer: Offer = line.hear()?;
    let run_dir = tempfile::tempdir_in(temporary)?;
    let engine = probe::engine("probe", None, here, run_dir.path())?;
    let endpoint = Endpoint::from_bytes(&offer.endpoint)?;
    let target = RegionDesc::from_bytes(&offer.region)?;
    let session = engine.connect(&endpoint)?;
    let way = format!("from {here} to {peer}");
    let measured = probe::probe(&engine, session, target, way)?;
    let bytes = probe::write_pattern(&engine, session, target, COMPARED_BYTES)?;
    line.say(&Question { compared_bytes: COMPARED_BYTES })?;
    let Answer { checksum: landed } = line.hear()?;
    if landed != checksum(&bytes) {
        return Err(
            format!("what landed at {peer} is not what was written: do not use this way").into()
        );
    }
    Ok(measured)
}

/// JSON objects, one a line, in both directions.
struct Lines {
    reader: BufReader<TcpStream>,
}

impl Lines {
    fn new(stream: TcpStream) -> Result<Lines, Box<dyn Error>> {
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        Ok(Lines { reader: BufReader::new(stream) })
    }

    fn say(&mut self, what: &impl Serialize) -> Result<(), Box<dyn Error>> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        Ok(self.reader.get_mut().write_all(&line)?)
    }

    fn hear<T: DeserializeOwned>(&mut self) -> Result<T, Box<dyn Error>> {
        let mut line = Vec::new();
        (&mut self.reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Err("the other side has closed the connection".into());
        }
        serde_json::from_slice(&line)
            .map_err(|error| format!("the other side is no `kvasir doctor`: {error}").into())
    }
}
