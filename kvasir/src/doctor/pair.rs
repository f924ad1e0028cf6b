//! A probe between two hosts: one serves a region, the other writes to it and then asks what has
//! landed there.
//!
//! Both talk over a TCP connection of their own, a JSON object a line: the server says for each way that it
//! has where an engine is and what may be written; the other one probes those that it has too, and asks for a
//! checksum after each; when it hangs up the server forgets them. One probe at a time.

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use kvasir_transfer::{Domain, EfaConfig, Endpoint, RegionDesc, checksum};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::probe::{self, Side, Ways};
use super::report::{Finding, Probe, Section};
use crate::output::{complain, say};

/// A probe that says nothing for so long is over.
const SILENCE: Duration = Duration::from_secs(30);
/// So is one that takes so long: others wait for it.
const WHOLE: Duration = Duration::from_secs(300);
const LINE_BYTES_MAX: u64 = 1 << 20;
/// What is written last and compared.
const COMPARED_BYTES: usize = 1 << 20;

/// The ways that are probed, and how they are called on the wire.
const WAYS: [(&str, Ways); 3] = [
    ("plain", Ways::Plain),
    ("verbs", Ways::Only(Domain::Verbs)),
    ("efa", Ways::Only(Domain::Efa)),
];

#[derive(Serialize, Deserialize)]
struct Offer {
    way: String,
    endpoint: Vec<u8>,
    region: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
struct Question {
    /// Which of the offers.
    offer: usize,
    compared_bytes: usize,
}

#[derive(Serialize, Deserialize)]
struct Answer {
    checksum: u64,
}

/// Serves probes until the process is ended.
pub(super) fn serve(
    address: SocketAddr,
    efa: &EfaConfig,
    temporary: &Path,
) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(address)
        .map_err(|error| format!("cannot listen on {address}: {error}"))?;
    let address = listener.local_addr()?;
    say(&format!(
        "waiting for a measurement; run on the other host: kvasir doctor --peer HOST:{}",
        address.port()
    ));
    loop {
        let (stream, from) = listener.accept()?;
        say(&format!("started a measurement with {from}"));
        match within(WHOLE, stream, |stream| serve_one(stream, efa, temporary)) {
            Ok(()) => say(&format!("finished the measurement with {from}")),
            Err(error) => complain(&format!("the measurement with {from} failed: {error}")),
        }
    }
}

/// Closes the connection, and with it whatever is read from it or written to it, when the time is over.
fn within(
    time: Duration,
    stream: TcpStream,
    serve: impl FnOnce(TcpStream) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let (watched, (done, over)) = (stream.try_clone()?, sync_channel::<()>(0));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if over.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
                // It may have been closed at this moment.
                let _ = watched.shutdown(Shutdown::Both);
            }
        });
        // Dropped when it has been served, however that ends.
        let _done = done;
        serve(stream)
    })
}

fn serve_one(stream: TcpStream, efa: &EfaConfig, temporary: &Path) -> Result<(), Box<dyn Error>> {
    let run_dir = tempfile::tempdir_in(temporary)?;
    let here = stream.local_addr()?.ip();
    let (mut offers, mut offered) = (Vec::new(), Vec::new());
    for (way, ways) in WAYS {
        let side = match (ways, probe::side_of("probed", ways, efa, here, run_dir.path())) {
            // There is no such card here.
            (Ways::Only(_), Err(_)) => continue,
            (_, side) => side?,
        };
        let (region, descriptor) = probe::region(&side.engine)?;
        let endpoint = side.engine.endpoint().to_bytes();
        offers.push(Offer { way: way.to_owned(), endpoint, region: descriptor.to_bytes() });
        offered.push((side, region));
    }
    let mut line = Lines::new(stream)?;
    line.say(&offers)?;
    while let Some(Question { offer, compared_bytes }) = line.hear()? {
        let (_, region) =
            offered.get(offer).ok_or("the peer requested a transport that was not offered")?;
        let mut bytes = vec![0; compared_bytes.min(probe::REGION_BYTES)];
        region.memory().copy_to(0, &mut bytes)?;
        line.say(&Answer { checksum: checksum(&bytes) })?;
    }
    Ok(())
}

/// What was measured, and what could not be.
#[derive(Default)]
pub(super) struct Measured {
    pub probes: Vec<Probe>,
    pub left_out: Vec<Finding>,
}

impl Measured {
    pub(super) fn section(&mut self) -> Option<Section> {
        let findings = std::mem::take(&mut self.left_out);
        (!findings.is_empty()).then_some(Section { title: "not measured", findings })
    }
}

/// Probes the ways to a host that serves.
pub(super) fn probe(
    peer: SocketAddr,
    efa: &EfaConfig,
    temporary: &Path,
) -> Result<Measured, Box<dyn Error>> {
    let unreachable =
        |error| format!("cannot reach {peer} ({error}); start `kvasir doctor --serve` there");
    let stream = TcpStream::connect_timeout(&peer, SILENCE).map_err(unreachable)?;
    let here = stream.local_addr()?.ip();
    let mut line = Lines::new(stream)?;
    let offers: Vec<Offer> = line.hear()?.ok_or("the peer closed the connection")?;
    let run_dir = tempfile::tempdir_in(temporary)?;
    let mut measured = Measured::default();
    for (way, ways) in WAYS {
        let offered = offers.iter().enumerate().find(|(_, offer)| offer.way == way);
        let side = probe::side_of("probe", ways, efa, here, run_dir.path());
        let left_out = |why: &str| Some(Finding::advice(way, why));
        let why_not = match (&offered, &side, ways) {
            (_, Err(error), Ways::Plain) => return Err(error.to_string().into()),
            (Some(_), Ok(_), _) => None,
            (Some(_), Err(error), _) => {
                left_out(&format!("{peer} has it, but this host does not: {error}"))
            }
            (None, Ok(_), _) => left_out(&format!("this host has it, but {peer} does not")),
            // Neither has it: that is not worth a word.
            (None, Err(_), _) => continue,
        };
        measured.left_out.extend(why_not);
        let (Some((number, offer)), Ok(side)) = (offered, side) else { continue };
        let mut probe = write_to(&side, offer)?;
        let used = side.used()?;
        if let Ways::Only(domain) = ways
            && used != domain.label()
        {
            let why = format!("the NIC does not reach {peer}: the writes used {used}");
            measured.left_out.push(Finding::advice(way, why));
            continue;
        }
        compare(&side, (number, offer), &mut line)
            .map_err(|error| format!("{used}, to {peer}: {error}"))?;
        probe.transport = format!("{used}, from {here} to {peer}");
        measured.probes.push(probe);
    }
    Ok(measured)
}

fn write_to(side: &Side, offer: &Offer) -> Result<Probe, Box<dyn Error>> {
    let peer = side.engine.connect(&Endpoint::from_bytes(&offer.endpoint)?)?;
    probe::probe(&side.engine, peer, RegionDesc::from_bytes(&offer.region)?)
}

/// Whether what lands there is what was written.
fn compare(
    side: &Side,
    (number, offer): (usize, &Offer),
    line: &mut Lines,
) -> Result<(), Box<dyn Error>> {
    let peer = side.engine.connect(&Endpoint::from_bytes(&offer.endpoint)?)?;
    let target = RegionDesc::from_bytes(&offer.region)?;
    let bytes = probe::write_pattern(&side.engine, peer, target, COMPARED_BYTES)?;
    line.say(&Question { offer: number, compared_bytes: COMPARED_BYTES })?;
    let Answer { checksum: landed } = line.hear()?.ok_or("the peer closed the connection")?;
    if landed != checksum(&bytes) {
        return Err(
            "the bytes at the peer differ from the written bytes: do not use this transport".into(),
        );
    }
    Ok(())
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

    /// `None` when the other side has hung up.
    fn hear<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Box<dyn Error>> {
        let mut line = Vec::new();
        (&mut self.reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Ok(None);
        }
        serde_json::from_slice(&line)
            .map(Some)
            .map_err(|error| format!("the peer is not a `kvasir doctor`: {error}").into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_says_a_byte_now_and_then_does_not_keep_the_port() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let slow = std::thread::spawn(move || {
            let mut stream = TcpStream::connect(address).expect("connected");
            // Until it is closed.
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let (stream, _) = listener.accept().expect("a connection");
        let heard = within(Duration::from_millis(200), stream, |stream| {
            Lines::new(stream)?.hear::<Question>().map(|_| ())
        });
        assert!(heard.is_err(), "it never ends its line");
        slow.join().expect("closed");
    }
}
