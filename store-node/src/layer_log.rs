//! The layer log: a line for each layer of each share pushed, written by a thread of its own so
//! that the node never waits for a disk. When the disk does not keep up, lines are dropped and
//! counted.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use kvasir_proto::Share;
use prometheus::IntCounter;

const LINES_MAX: usize = 65_536;
const FLUSH_EVERY: Duration = Duration::from_millis(100);

/// One layer of some pages of one share: when its writes were issued and when the last landed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerLine {
    pub share: Share,
    /// `None` for pages that were there before any step.
    pub step: Option<u32>,
    pub layer: u32,
    pub first_page: u32,
    pub pages: u32,
    /// Microseconds of `CLOCK_MONOTONIC`.
    pub issued_us: u64,
    pub landed_us: u64,
}

impl LayerLine {
    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        let LayerLine { share, step, layer, first_page, pages, issued_us, landed_us } = self;
        let step = step.map_or_else(|| "null".to_owned(), |step| step.to_string());
        writeln!(
            out,
            "{{\"share\":\"{share}\",\"step\":{step},\"layer\":{layer},\
             \"first_page\":{first_page},\"pages\":{pages},\
             \"issued_us\":{issued_us},\"landed_us\":{landed_us}}}"
        )
    }
}

/// The end that the node holds. Dropping it ends the thread once all lines are written.
#[derive(Debug)]
pub(crate) struct LayerLog {
    lines: SyncSender<LayerLine>,
    dropped: IntCounter,
}

impl LayerLog {
    /// Opens the file for appending and starts the writer.
    ///
    /// # Errors
    /// When the file cannot be opened or the thread not be started.
    pub(crate) fn start(path: &Path, dropped: IntCounter) -> std::io::Result<Self> {
        let file = File::options().create(true).append(true).open(path)?;
        let (lines, receiver) = sync_channel(LINES_MAX);
        std::thread::Builder::new()
            .name("layer-log".into())
            .spawn(move || write_lines(file, &receiver))?;
        Ok(LayerLog { lines, dropped })
    }

    /// Hands a line over without waiting.
    pub(crate) fn line(&self, line: LayerLine) {
        if self.lines.try_send(line).is_err() {
            self.dropped.inc();
        }
    }
}

fn write_lines(file: File, lines: &Receiver<LayerLine>) {
    let mut out = BufWriter::new(file);
    loop {
        let written = match lines.recv_timeout(FLUSH_EVERY) {
            Ok(line) => line.write(&mut out),
            Err(RecvTimeoutError::Timeout) => out.flush(),
            Err(RecvTimeoutError::Disconnected) => {
                // The last lines, on a best effort: nobody is left to be told.
                let _ = out.flush();
                return;
            }
        };
        if let Err(error) = written {
            tracing::error!(%error, "the store node cannot write the layer log; the log ends here");
            return;
        }
    }
}
