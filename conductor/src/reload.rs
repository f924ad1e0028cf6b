//! Follows files that an operator changes while the conductor runs: keys and certificates.
//!
//! They are read again every so often and compared with what was taken last, whatever their times
//! of change say. What is new is taken when it was read twice alike, so that a file that is just
//! being written is not; what is wrong is told once, and what was valid stays.

use std::path::{Path, PathBuf};
use std::time::Duration;

use prometheus::IntCounter;
use tokio::time::{MissedTickBehavior, interval};

/// A file that cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{} has more than {bytes_max} bytes", path.display())]
    TooLarge { path: PathBuf, bytes_max: u64 },
}

/// All of a file that is not longer than it may be. Blocks.
pub(crate) fn read_bounded(path: &Path, bytes_max: u64) -> Result<Vec<u8>, ReadError> {
    use std::io::Read;
    let failed = |source| ReadError::Io { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > bytes_max {
        return Err(ReadError::TooLarge { path: path.to_owned(), bytes_max });
    }
    Ok(bytes)
}

/// How often files were taken anew, and how often what was new in them was wrong.
#[derive(Debug, Clone)]
pub(crate) struct Counters {
    pub taken: IntCounter,
    pub refused: IntCounter,
}

/// What is followed.
#[derive(Debug)]
pub(crate) struct Followed {
    /// For the log.
    pub what: &'static str,
    pub every: Duration,
    pub counters: Counters,
}

/// Follows for as long as it is polled. `now` is what is valid at the start; `read` blocks.
pub(crate) async fn follow<T, E>(
    followed: Followed,
    mut now: T,
    read: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    take: impl Fn(&T) -> Result<(), E>,
) where
    T: PartialEq + Send + 'static,
    E: std::fmt::Display + Send + 'static,
{
    let Followed { what, every, counters } = followed;
    let read = std::sync::Arc::new(read);
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut once: Option<T> = None;
    let mut told: Option<String> = None;
    loop {
        ticks.tick().await;
        let read = std::sync::Arc::clone(&read);
        let Ok(read) = tokio::task::spawn_blocking(move || read()).await else { continue };
        let taken = match read {
            Ok(new) if new == now => {
                (once, told) = (None, None);
                continue;
            }
            Ok(new) if once.as_ref() == Some(&new) => take(&new).map(|()| new),
            Ok(new) => {
                once = Some(new);
                continue;
            }
            Err(error) => {
                once = None;
                Err(error)
            }
        };
        match taken {
            Ok(new) => {
                tracing::info!(file = what, "the conductor reloaded a file");
                counters.taken.inc();
                (now, once, told) = (new, None, None);
            }
            Err(error) => {
                let error = error.to_string();
                if told.as_ref() != Some(&error) {
                    tracing::error!(
                        file = what,
                        error,
                        "the conductor rejected the new file; keeping the previous one"
                    );
                    counters.refused.inc();
                    told = Some(error);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use tokio::sync::mpsc;

    use super::*;

    /// What is taken when these are read, one after the other. Reading fails afterwards.
    async fn taken(reads: &[Result<u32, &'static str>]) -> Vec<u32> {
        let counter = |name: &str| IntCounter::new(name, "for a test").expect("a counter");
        let counters = Counters { taken: counter("taken"), refused: counter("refused") };
        let followed = Followed { what: "numbers", every: Duration::from_millis(1), counters };
        let (over, mut is_over) = mpsc::channel(1);
        let left: Mutex<VecDeque<_>> = Mutex::new(reads.iter().copied().collect());
        let read = move || {
            let next = left.lock().expect("no panic").pop_front();
            next.unwrap_or_else(|| {
                let _ = over.try_send(());
                Err("no more")
            })
        };
        let taken = Mutex::new(Vec::new());
        let take = |new: &u32| {
            taken.lock().expect("no panic").push(*new);
            Ok(())
        };
        tokio::select! {
            () = follow(followed, 0, read, take) => panic!("it follows for ever"),
            _ = is_over.recv() => {}
        }
        taken.into_inner().expect("no panic")
    }

    #[tokio::test]
    async fn what_is_new_is_taken_when_two_readings_in_a_row_agree() {
        assert_eq!(taken(&[Ok(0), Ok(1), Ok(1), Ok(1)]).await, [1]);
        assert_eq!(taken(&[Ok(1), Ok(2), Ok(1), Ok(2)]).await, [0; 0]);
        assert_eq!(taken(&[Ok(1), Ok(0), Ok(1)]).await, [0; 0]);
        assert_eq!(taken(&[Ok(1), Err("half"), Ok(1)]).await, [0; 0], "not in a row");
        assert_eq!(taken(&[Ok(1), Err("half"), Ok(1), Ok(1)]).await, [1]);
    }
}
