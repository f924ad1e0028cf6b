//! What an engine tells about itself.

use prometheus::{IntCounter, IntCounterVec, IntGauge, Opts, Registry};

use crate::config::Domain;
use kvasir_transfer_core::{Refusal, Told};

/// One domain's counters, looked up once.
#[derive(Debug, Clone)]
pub(crate) struct DomainMetrics {
    pub(crate) sent_bytes: IntCounter,
    pub(crate) received_bytes: IntCounter,
    pub(crate) sent_writes: IntCounter,
    pub(crate) received_writes: IntCounter,
    pub(crate) sent_messages: IntCounter,
    pub(crate) received_messages: IntCounter,
    /// Sent again though they had arrived.
    pub(crate) repeated_messages: IntCounter,
    pub(crate) corrupt: IntCounter,
    pub(crate) malformed: IntCounter,
    pub(crate) not_admitted: IntCounter,
    pub(crate) cut_off: IntCounter,
    /// One side has no certificate that the other one accepts.
    pub(crate) untrusted: IntCounter,
    pub(crate) idle: IntCounter,
    /// The peer showed no life.
    pub(crate) silent: IntCounter,
    /// Paths that failed while they were up.
    pub(crate) paths_lost: IntCounter,
    pub(crate) sessions_lost: IntCounter,
    /// Ways that have ended again and again, and are left alone for a moment.
    pub(crate) paused: IntCounter,
    refused: [IntCounter; Refusal::ALL.len()],
}

impl DomainMetrics {
    pub(crate) fn refused(&self, refusal: Refusal) -> &IntCounter {
        let at = Refusal::ALL.iter().position(|entry| entry.0 == refusal);
        &self.refused[at.expect("every refusal stands in the table")]
    }
}

/// By domain, card and direction.
#[derive(Debug, Clone)]
pub(crate) struct CardBytes(pub(crate) IntCounterVec, pub(crate) IntCounterVec);

#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    pub(crate) card_bytes: CardBytes,
    pub(crate) shm: DomainMetrics,
    pub(crate) tcp: DomainMetrics,
    pub(crate) verbs: DomainMetrics,
    pub(crate) efa: DomainMetrics,
    /// Transfers of put-with-signal that have ended, by how their peers are told.
    signalled: IntCounter,
    counted: IntCounter,
    pub(crate) imm_counters: IntGauge,
    pub(crate) imm_early_discarded: IntCounter,
    pub(crate) imm_excess: IntCounter,
    pub(crate) operations: IntGauge,
    /// Message buffers that are with the application.
    pub(crate) message_buffers: IntGauge,
    pub(crate) connections: IntGauge,
    /// Revocations and cut-offs that wait for a writer.
    pub(crate) quiescing: IntGauge,
}

impl Metrics {
    pub(crate) fn register(registry: &Registry, prefix: &str) -> Result<Self, prometheus::Error> {
        let vector = |name: &str, help: &str, labels: &[&str]| {
            let vector = IntCounterVec::new(Opts::new(format!("{prefix}_{name}"), help), labels)?;
            registry.register(Box::new(vector.clone()))?;
            Ok::<_, prometheus::Error>(vector)
        };
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(format!("{prefix}_{name}"), help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok::<_, prometheus::Error>(gauge)
        };
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(format!("{prefix}_{name}"), help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let both = ["transport", "direction"];
        let bytes = vector("bytes_total", "Bytes of writes, by transport and direction.", &both)?;
        let writes =
            vector("writes_total", "Writes with an immediate, by transport and direction.", &both)?;
        let messages = vector(
            "messages_total",
            "Messages sent and received, by transport and direction.",
            &both,
        )?;
        let duplicates = vector(
            "duplicate_messages_total",
            "Messages that were received again after a failover, and ignored, by transport.",
            &["transport"],
        )?;
        let refused = vector(
            "refused_total",
            "Refused writes and messages, by transport and reason.",
            &["transport", "reason"],
        )?;
        let corrupt = vector(
            "corrupt_writes_total",
            "Writes whose checksum did not match, by transport.",
            &["transport"],
        )?;
        let closed = vector(
            "connections_closed_total",
            "Connections and sessions that ended with an error, by transport and reason.",
            &["transport", "reason"],
        )?;
        let paused = vector(
            "paths_paused_total",
            "Pauses before a reconnection, after repeated failures of a path, by transport.",
            &["transport"],
        )?;
        let told = vector(
            "signalled_puts_total",
            "Finished put-with-signal transfers, by the method that notifies the peer.",
            &["method"],
        )?;
        let domain = |domain: Domain| {
            let label = domain.label();
            DomainMetrics {
                sent_bytes: bytes.with_label_values(&[label, "sent"]),
                received_bytes: bytes.with_label_values(&[label, "received"]),
                sent_writes: writes.with_label_values(&[label, "sent"]),
                received_writes: writes.with_label_values(&[label, "received"]),
                sent_messages: messages.with_label_values(&[label, "sent"]),
                received_messages: messages.with_label_values(&[label, "received"]),
                repeated_messages: duplicates.with_label_values(&[label]),
                corrupt: corrupt.with_label_values(&[label]),
                malformed: closed.with_label_values(&[label, "malformed"]),
                not_admitted: closed.with_label_values(&[label, "not_admitted"]),
                cut_off: closed.with_label_values(&[label, "cut_off"]),
                untrusted: closed.with_label_values(&[label, "untrusted"]),
                idle: closed.with_label_values(&[label, "idle"]),
                silent: closed.with_label_values(&[label, "silent"]),
                paths_lost: closed.with_label_values(&[label, "path_lost"]),
                sessions_lost: closed.with_label_values(&[label, "session_lost"]),
                paused: paused.with_label_values(&[label]),
                refused: Refusal::ALL.map(|entry| refused.with_label_values(&[label, entry.2])),
            }
        };
        let refused_datagrams = vector(
            "nic_datagrams_refused_total",
            "Datagrams to a NIC that belong to none of its handshakes.",
            &["transport", "nic"],
        )?;
        let card_bytes = vector(
            "nic_bytes_total",
            "Bytes of writes, by NIC. The receiver sees counted writes only.",
            &["transport", "nic", "direction"],
        )?;
        Ok(Metrics {
            card_bytes: CardBytes(card_bytes, refused_datagrams),
            shm: domain(Domain::Shm),
            tcp: domain(Domain::Tcp),
            verbs: domain(Domain::Verbs),
            efa: domain(Domain::Efa),
            signalled: told.with_label_values(&["signal"]),
            counted: told.with_label_values(&["counter"]),
            imm_counters: gauge(
                "imm_counters",
                "Immediates that are expected, reached or counted early.",
            )?,
            imm_early_discarded: counter(
                "imm_early_discarded_total",
                "Early counts of immediates discarded for lack of space.",
            )?,
            imm_excess: counter("imm_excess_total", "Arrivals beyond the expected count.")?,
            message_buffers: gauge(
                "message_buffers",
                "Messages of peers whose buffers the application holds.",
            )?,
            operations: gauge("operations_in_flight", "Operations in flight.")?,
            connections: gauge("connections", "Open connections, in both directions.")?,
            quiescing: gauge(
                "revocations_pending",
                "Revocations and cut-offs that wait for a writer to stop.",
            )?,
        })
    }

    pub(crate) fn signalled(&self, told: Option<Told>) {
        match told {
            Some(Ok(())) => self.signalled.inc(),
            Some(Err(_)) => self.counted.inc(),
            None => {}
        }
    }

    pub(crate) fn of(&self, domain: Domain) -> &DomainMetrics {
        match domain {
            Domain::Shm => &self.shm,
            Domain::Tcp => &self.tcp,
            Domain::Verbs => &self.verbs,
            Domain::Efa => &self.efa,
        }
    }
}
