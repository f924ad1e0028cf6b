//! What concerns efa only: over libfabric's provider `tcp`, with disorder in between. Where libfabric is not
//! installed these tests are skipped, and say so.

use std::io::{Read, Write as _};
use std::net::TcpStream;

use kvasir_transfer::{
    Completion, Domain, EfaConfig, Handlers, Refusal, Source, StartError, TransferConfig,
    TransferEngine, VerbsConfig, Write, WriteError,
};

use crate::engine::tcp_config;
use crate::provider;
use crate::verbs::{LONG, Side, greeting, inline, outcome, read};

fn config() -> Option<TransferConfig> {
    let efa = Some(provider::shuffled(provider::TCP)?.clone());
    Some(TransferConfig { preferred: Domain::Efa, efa, ..tcp_config() })
}

#[test]
fn without_the_network_an_engine_says_in_a_sentence_what_is_missing() {
    let start = |config| {
        TransferEngine::start(config, Handlers::default(), &prometheus::Registry::new())
            .expect_err("it cannot start")
    };
    let efa = |provider: &str, device: Option<&str>| {
        let (provider, device) = (provider.to_owned(), device.map(String::from));
        Some(EfaConfig { provider, device, ..EfaConfig::default() })
    };
    let absent = efa("tcp", Some("no-such-device"));
    let error = start(TransferConfig { efa: absent.clone(), ..tcp_config() });
    assert!(matches!(error, StartError::Card("efa", _)), "{error:?}");
    let said = error.to_string();
    assert!(said.contains("libfabric") || said.contains("`no-such-device`"), "{said}");
    let unknown = start(TransferConfig { efa: efa("udp", None), ..tcp_config() });
    assert!(matches!(unknown, StartError::Config("efa.provider")), "{unknown:?}");
    let verbs = Some(VerbsConfig::default());
    let both = start(TransferConfig { efa: absent.clone(), verbs, ..tcp_config() });
    assert!(matches!(both, StartError::TwoCards), "{both:?}");
    let run_dir = tempfile::tempdir().expect("a directory");
    let run_dir = Some(run_dir.path().to_owned());
    let alone = start(TransferConfig { efa: absent, run_dir, ..TransferConfig::default() });
    assert!(matches!(alone, StartError::RdmaWithoutTcp), "{alone:?}");
}

/// A source that is not registered goes in many posts, of which none says anything of the others.
#[test]
fn a_write_of_many_posts_is_counted_only_after_the_last_byte() {
    let Some(config) = config() else { return };
    let (a, b) = (Side::new(config.clone()), Side::new(config));
    let bytes = 600_000;
    let (region, descriptor) = b.region(bytes);
    let peer = a.peer(&b);
    for round in 1..=20u8 {
        let reached = b.expect(round.into(), 1);
        let written = a.write(inline(peer, descriptor, vec![round; bytes], round.into()));
        assert_eq!(outcome(&reached), Ok(()));
        let landed = read(&region, 0, bytes);
        assert!(landed.iter().all(|byte| *byte == round), "round {round}: a byte came later");
        assert_eq!(outcome(&written), Ok(()));
    }
    let (done, forgotten) = Completion::future();
    b.engine.cancel_imm(20, done).expect("accepted");
    assert_eq!(outcome(&forgotten), Ok(()));
    assert_eq!((a.sent(Domain::Tcp), a.sent(Domain::Efa)), (0.0, 20.0 * bytes as f64));
}

/// The writer has its descriptor of the revoked region by heart: the provider refuses it, and ends everything
/// that was on its connection. What else was under way is counted exactly.
#[test]
fn what_the_provider_refuses_costs_its_neighbours_a_path_and_no_count() {
    let Some(config) = config() else { return };
    let b = Side::new(config.clone());
    for round in 0..3 {
        let a = Side::new(config.clone());
        let (good, good_descriptor) = b.region(40 * 64);
        let (bad, bad_descriptor) = b.region(64);
        b.revoke(&bad);
        let (peer, reached) = (a.peer(&b), b.expect(round, 40));
        let (mut neighbours, mut refused) = (Vec::new(), None);
        for at in 0..40u8 {
            let source = Source::Inline(vec![at + 1; 64]);
            let write = Write { source, ..inline(peer, good_descriptor, Vec::new(), round) };
            neighbours.push(a.write(Write { target_offset: u64::from(at) * 64, ..write }));
            if at == 20 {
                refused = Some(a.write(inline(peer, bad_descriptor, vec![9; 64], 77)));
            }
        }
        let revoked = Err(WriteError::Refused(Refusal::Revoked));
        assert_eq!(refused.as_ref().map(outcome), Some(revoked), "the reason is asked for");
        for written in &neighbours {
            assert_eq!(outcome(written), Ok(()));
        }
        assert_eq!(outcome(&reached), Ok(()), "each is counted");
        for at in 0..40u8 {
            assert_eq!(read(&good, usize::from(at) * 64, 64), [at + 1; 64]);
        }
        let (done, forgotten) = Completion::future();
        b.engine.cancel_imm(round, done).expect("accepted");
        assert_eq!(outcome(&forgotten), Ok(()));
        let twice = b.expect(round, 1);
        let nothing = twice.wait_timeout(std::time::Duration::from_millis(20));
        assert_eq!(nothing, None, "none is counted twice");
    }
}

/// It ends a path each time, but what the peer refuses is no fault of the way to it.
#[test]
fn what_the_provider_refuses_again_and_again_pauses_no_way() {
    let Some(config) = config() else { return };
    let (a, b) = (Side::new(config.clone()), Side::new(config));
    let (_good, descriptor) = b.region(64);
    let revoked = (0..4).map(|_| {
        // Before there is a writer who could be told.
        let (bad, descriptor) = b.region(64);
        b.revoke(&bad);
        descriptor
    });
    let revoked: Vec<_> = revoked.collect();
    let peer = a.peer(&b);
    for (round, bad) in (0..).zip(revoked) {
        assert_eq!(outcome(&a.write(inline(peer, descriptor, vec![1; 64], round))), Ok(()));
        let refused = a.write(inline(peer, bad, vec![9; 64], 77));
        assert_eq!(outcome(&refused), Err(WriteError::Refused(Refusal::Revoked)));
    }
    assert!(a.closed_by("efa", "path_lost") >= 2.0, "otherwise this shows nothing");
    assert_eq!(a.paused(Domain::Efa), 0.0);
}

/// As where there is not enough locked memory for it. Not even a path is lost by it.
#[test]
fn a_region_that_the_card_did_not_take_goes_by_tcp_and_all_others_by_the_card() {
    let Some(config) = config() else { return };
    let (a, b) = (Side::new(config.clone()), Side::new(config));
    let bytes = 3 << 20;
    let (taken, by_card) = b.region(bytes);
    b.engine.withhold_regions_from_cards(true);
    let (withheld, by_tcp) = b.region(bytes);
    let peer = a.peer(&b);
    let counted = b.expect(1, 12);
    let mut written = Vec::new();
    for round in 1..=6u8 {
        for target in [by_card, by_tcp] {
            written.push(a.write(inline(peer, target, vec![round; bytes], 1)));
        }
        assert!(written.drain(..).all(|written| outcome(&written) == Ok(())), "round {round}");
        assert!(read(&taken, 0, bytes) == vec![round; bytes]);
        assert!(read(&withheld, 0, bytes) == vec![round; bytes]);
    }
    assert_eq!(outcome(&counted), Ok(()), "each is one count");
    let each = 6.0 * bytes as f64;
    assert_eq!((a.sent(Domain::Efa), a.sent(Domain::Tcp)), (each, each));
    assert_eq!((a.closed_by("efa", "path_lost"), a.closed_by("tcp", "path_lost")), (0.0, 0.0));
}

/// Who says what was not asked for loses its own path only.
#[test]
fn a_writer_that_settles_what_nobody_asked_about_is_malformed() {
    let Some(config) = config() else { return };
    let (a, b) = (Side::new(config.clone()), Side::new(config));
    let (region, descriptor) = b.region(64);
    let endpoint = b.engine.endpoint();
    let mut stream = TcpStream::connect(endpoint.tcp.expect("tcp")).expect("taken");
    stream.set_read_timeout(Some(LONG)).expect("set");
    stream.write_all(&greeting(&endpoint, 4, b"whatever")).expect("sent");
    let mut prefix = [0; 8];
    stream.read_exact(&mut prefix).expect("a reply");
    let length = u32::from_le_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]) as usize;
    let mut reply = vec![0; length];
    stream.read_exact(&mut reply).expect("a reply");
    // `Admission::Admitted`, as the first field.
    assert_eq!(reply.get(..2), Some([8, 1].as_slice()), "{reply:?}");
    let settled = [[9, 0, 0, 0].as_slice(), &[8 << 3 | 1], &7_u64.to_le_bytes()].concat();
    stream.write_all(&settled).expect("sent");
    assert_eq!(stream.read_to_end(&mut Vec::new()).ok(), Some(0), "an end, and no silence");
    // It is counted when its end of the pipe is closed.
    let started = std::time::Instant::now();
    while b.closed_by("efa", "malformed") < 1.0 && started.elapsed() < LONG {
        std::thread::yield_now();
    }
    assert_eq!(b.closed_by("efa", "malformed"), 1.0);
    assert_eq!(outcome(&a.write(inline(a.peer(&b), descriptor, b"well".to_vec(), 1))), Ok(()));
    assert_eq!(read(&region, 0, 4), b"well");
}
