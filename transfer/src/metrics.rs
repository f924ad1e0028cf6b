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
    pub(crate) imm_early_forgotten: IntGauge,
    pub(crate) imm_excess: IntGauge,
    pub(crate) operations: IntGauge,
    /// Message buffers that are with the application.
    pub(crate) message_buffers: IntGauge,
    pub(crate) connections: IntGauge,
    /// Revocations and cut-offs that wait for a writer.
    pub(crate) quiescing: IntGauge,
}

impl Metrics {
    pub(crate) fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let vector = |name: &str, help: &str, labels: &[&str]| {
            let vector =
                IntCounterVec::new(Opts::new(format!("kvasir_transfer_{name}"), help), labels)?;
            registry.register(Box::new(vector.clone()))?;
            Ok::<_, prometheus::Error>(vector)
        };
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(format!("kvasir_transfer_{name}"), help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok::<_, prometheus::Error>(gauge)
        };
        let both = ["domain", "direction"];
        let bytes = vector("bytes_total", "Bytes of writes.", &both)?;
        let writes = vector(
            "writes_total",
            "Writes with an immediate, as they are sent and as they are counted.",
            &both,
        )?;
        let messages = vector("messages_total", "Messages.", &both)?;
        let refused =
            vector("refused_total", "Writes and messages refused.", &["domain", "reason"])?;
        let corrupt = vector("corrupt_total", "Writes whose checksum did not agree.", &["domain"])?;
        let closed = vector(
            "connections_closed_total",
            "Connections that did not end in peace.",
            &["domain", "reason"],
        )?;
        let paused = vector(
            "ways_paused_total",
            "Connections that are not made anew at once, because those by the same way ended again and again.",
            &["domain"],
        )?;
        let told = vector(
            "signalled_total",
            "Transfers of put-with-signal that have ended, by how their peers are told.",
            &["by"],
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
                repeated_messages: messages.with_label_values(&[label, "repeated"]),
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
            "card_datagrams_refused_total",
            "Datagrams to a network card that belong to no handshake of it.",
            &["domain", "card"],
        )?;
        let card_bytes = vector(
            "card_bytes_total",
            "Bytes of writes, by network card. A card tells its receiver of counted writes only.",
            &["domain", "card", "direction"],
        )?;
        Ok(Metrics {
            card_bytes: CardBytes(card_bytes, refused_datagrams),
            shm: domain(Domain::Shm),
            tcp: domain(Domain::Tcp),
            verbs: domain(Domain::Verbs),
            efa: domain(Domain::Efa),
            signalled: told.with_label_values(&["signal"]),
            counted: told.with_label_values(&["counter"]),
            imm_counters: gauge("imm_counters", "Immediates that are counted or remembered.")?,
            imm_early_forgotten: gauge(
                "imm_early_forgotten",
                "Early counts forgotten for lack of room since the start.",
            )?,
            imm_excess: gauge("imm_excess", "Arrivals beyond their count since the start.")?,
            message_buffers: gauge(
                "message_buffers",
                "Messages of peers that the application holds.",
            )?,
            operations: gauge("operations", "Operations under way.")?,
            connections: gauge("connections", "Connections, both directions.")?,
            quiescing: gauge("quiescing", "Revocations and cut-offs that wait for a writer.")?,
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
