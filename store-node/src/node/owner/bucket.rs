//! Between the block core and the task that talks to the object store: handing over what the core plans, taking back
//! what became of it, and what of all that others are told.

use kvasir_blocks::{RiseError, SsdBlock, UploadFrom};
use kvasir_proto::{BlockKey, Namespace, SlotIndex};
use tokio::sync::oneshot;

use super::Owner;
use crate::bucket::jobs::{BucketTask, Job, Report, Source};
use crate::clock;
use crate::ssd::thread;

/// The object store of a node that has one.
#[derive(Debug)]
pub(super) struct OnBucket {
    task: BucketTask,
    usable: bool,
    /// What it had at some time since the node was started is known.
    pub(super) is_listed: bool,
    state: String,
    /// The last thing that could not be done.
    error: Option<String>,
}

impl OnBucket {
    pub(super) fn new(task: BucketTask) -> Self {
        OnBucket { task, usable: false, is_listed: false, state: "opening".into(), error: None }
    }

    pub(super) fn flush(&mut self) -> bool {
        self.task.flush()
    }
}

impl Owner {
    /// Everything that the task has reported. Answers whether there was anything.
    pub(super) fn take_bucket(&mut self) -> bool {
        let mut worked = false;
        for _ in 0..super::BATCH {
            let Ok(report) = self.inbox.bucket.try_recv() else { break };
            self.take_bucket_report(report);
            worked = true;
        }
        worked
    }

    fn take_bucket_report(&mut self, report: Report) {
        let now_ms = clock::now_ms();
        match report {
            Report::Listed { blocks, left_out, foreign } => {
                let listed = [
                    ("blocks", blocks.len() as u64),
                    ("beyond_limit", left_out),
                    ("foreign", foreign),
                ];
                for (of, objects) in listed {
                    self.metrics.bucket_listed.with_label_values(&[of]).set(objects as i64);
                }
                self.blocks.bucket_listed(blocks, left_out == 0);
                if let Some(bucket) = &mut self.tiers.bucket {
                    bucket.is_listed = true;
                }
                self.blocks.expire(clock::unix_ms());
            }
            Report::State { usable, state } => {
                self.blocks.set_bucket_usable(usable);
                if let Some(bucket) = &mut self.tiers.bucket {
                    (bucket.usable, bucket.state) = (usable, state);
                }
                self.metrics.bucket_usable.set(usable.into());
            }
            Report::Uploaded { upload, result, why } => {
                self.note_bucket_error(why);
                self.blocks.uploaded(now_ms, upload, result);
            }
            Report::Risen { rise, result, why } => {
                self.metrics.bucket_wrong.inc_by(u64::from(result == Err(RiseError::Gone)));
                self.note_bucket_error(why);
                self.blocks.risen(now_ms, rise, result);
            }
            Report::Deleted { deleted, failed } => self.note_deleted(deleted, failed),
            Report::Discarded { discard, deleted, is_gone, why } => {
                self.note_deleted(deleted, (!is_gone).into());
                self.note_bucket_error(why);
                self.blocks.discarded(now_ms, discard, is_gone);
            }
        }
        self.run_actions();
    }

    fn note_deleted(&self, deleted: u64, failed: u64) {
        for (outcome, objects) in [("deleted", deleted), ("failed", failed)] {
            self.metrics.bucket_deletes.with_label_values(&[outcome]).inc_by(objects);
        }
    }

    fn note_bucket_error(&mut self, why: Option<String>) {
        let (Some(why), Some(bucket)) = (why, &mut self.tiers.bucket) else { return };
        self.metrics.bucket_errors.inc();
        if bucket.error.as_ref() != Some(&why) {
            tracing::warn!(
                reason = why,
                "an operation of the store node on the object store failed"
            );
            bucket.error = Some(why);
        }
    }

    pub(super) fn upload(
        &mut self,
        upload: u64,
        block: SsdBlock,
        from: UploadFrom,
        checksum: Option<u64>,
    ) {
        // What the SSD has is sent as it is there, also when no engine has said yet how blocks look.
        let from = match from {
            UploadFrom::Slot { slot, .. } => {
                Source::Slot { slot, checksum, shape: self.tiers.shape().clone() }
            }
            UploadFrom::Ssd => {
                let (reply, reading) = oneshot::channel();
                self.give_ssd_job(thread::Job::Read { key: block.key, reply });
                Source::Ssd(reading)
            }
            UploadFrom::Bucket(former) => Source::Bucket(former),
        };
        self.give_bucket(Job::Upload { upload, block, from });
    }

    pub(super) fn download(&mut self, rise: u64, slot: SlotIndex, block: SsdBlock) {
        let shape = self.tiers.shape().clone();
        self.give_bucket(Job::Download { rise, slot, block, shape });
    }

    pub(super) fn discard(&mut self, discard: u64, namespace: Namespace, key: BlockKey) {
        self.give_bucket(Job::Discard { discard, namespace, key });
    }

    fn give_bucket(&mut self, job: Job) {
        if let Some(bucket) = &mut self.tiers.bucket {
            bucket.task.give(job);
        }
    }

    /// Of a node that has an object store: in words whether it can be used.
    pub(super) fn bucket_state(&self) -> Option<String> {
        let bucket = self.tiers.bucket.as_ref()?;
        Some(bucket.state.clone())
    }
}
