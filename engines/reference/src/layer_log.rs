//! When each layer of each step was computed: lines of JSON for whoever wants to see how pushing
//! overlaps with computing. The compute thread only hands records over; when the writer is behind
//! they are dropped and counted, never waited for.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use kvasir_proto::Share;
use prometheus::IntCounter;

/// Steps of a few hundred layers each.
const RECORDS_MAX: usize = 16 * 1024;
const FLUSH_EVERY: Duration = Duration::from_millis(200);

/// What one share does in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShareInStep {
    pub share: Share,
    pub first_position: u32,
    pub positions: u32,
    /// Pages that the step finishes.
    pub first_page: u32,
    pub page_count: u32,
}

#[derive(Debug)]
struct Record {
    step: u32,
    layer: usize,
    computed_us: u64,
    shares: Arc<[ShareInStep]>,
}

/// The compute thread's end. The file is complete once it is dropped and the writer has ended.
#[derive(Debug)]
pub(crate) struct LayerLog {
    records: SyncSender<Record>,
    dropped: IntCounter,
}

/// The writer's thread.
pub(crate) type LayerLogWriter = std::thread::JoinHandle<()>;

impl LayerLog {
    /// Makes the file anew and starts the writer.
    ///
    /// # Errors
    /// When the file cannot be made or the thread not started.
    pub(crate) fn start(
        path: &Path,
        dropped: IntCounter,
    ) -> std::io::Result<(Self, LayerLogWriter)> {
        let file = BufWriter::new(File::create(path)?);
        let (sender, records) = sync_channel(RECORDS_MAX);
        let writer = std::thread::Builder::new()
            .name("layer-log".into())
            .spawn(move || write_records(file, &records))?;
        Ok((LayerLog { records: sender, dropped }, writer))
    }

    /// Layer `layer` of `step` was computed just now.
    pub(crate) fn record(
        &self,
        step: u32,
        layer: usize,
        computed_us: u64,
        shares: &Arc<[ShareInStep]>,
    ) {
        let record = Record { step, layer, computed_us, shares: Arc::clone(shares) };
        match self.records.try_send(record) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => self.dropped.inc(),
        }
    }
}

fn write_records(mut file: BufWriter<File>, records: &Receiver<Record>) {
    loop {
        let written = match records.recv_timeout(FLUSH_EVERY) {
            Ok(record) => writeln!(file, "{}", line(&record)),
            Err(RecvTimeoutError::Timeout) => file.flush(),
            Err(RecvTimeoutError::Disconnected) => break,
        };
        if let Err(error) = written {
            tracing::warn!(%error, "the engine cannot write the layer log; the log ends here");
            return;
        }
    }
    if let Err(error) = file.flush() {
        tracing::warn!(%error, "the engine cannot write the end of the layer log");
    }
}

fn line(record: &Record) -> serde_json::Value {
    let share = |share: &ShareInStep| {
        serde_json::json!({
            "share": share.share.to_string(),
            "first_position": share.first_position,
            "positions": share.positions,
            "first_page": share.first_page,
            "page_count": share.page_count,
        })
    };
    serde_json::json!({
        "step": record.step,
        "layer": record.layer,
        "computed_us": record.computed_us,
        "shares": record.shares.iter().map(share).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use kvasir_proto::{Side, TxId};

    use super::*;

    #[test]
    fn there_is_a_line_for_each_step_and_layer() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("layers.jsonl");
        let dropped = IntCounter::new("dropped", "dropped").expect("a counter");
        let (log, writer) = LayerLog::start(&path, dropped.clone()).expect("a file");
        let share = Share { tx: TxId { conductor_incarnation: 0, serial: 9 }, side: Side::Prefill };
        let shares: Arc<[ShareInStep]> = Arc::new([ShareInStep {
            share,
            first_position: 64,
            positions: 100,
            first_page: 1,
            page_count: 2,
        }]);
        for layer in 0..3 {
            log.record(7, layer, 1000 + layer as u64, &shares);
        }
        drop(log);
        writer.join().expect("the writer ends");
        let text = std::fs::read_to_string(path).expect("the file");
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[2]["step"], 7);
        assert_eq!(lines[2]["layer"], 2);
        assert_eq!(lines[2]["computed_us"], 1002);
        assert_eq!(lines[2]["shares"][0]["share"], share.to_string());
        assert_eq!(lines[2]["shares"][0]["page_count"], 2);
        assert_eq!(dropped.get(), 0);
    }
}
