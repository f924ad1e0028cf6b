//! Many peers on one queue, disorder, sleeping, threads, and what a host has.

use kvasir_transfer_libfabric::completion::{Completion, Immediate, Token};
use kvasir_transfer_libfabric::endpoint::{Endpoint, Write};
use kvasir_transfer_libfabric::error::PostError;
use kvasir_transfer_libfabric::info::{InfoRequest, Threading, choose};
use kvasir_transfer_libfabric::library::{ASKED, Library, OLDEST, Unavailable};
use kvasir_transfer_libfabric::queue::{QueueOptions, Wakeup};
use kvasir_transfer_libfabric::region::{Device, DmaBuf, RegisterError};
use kvasir_transfer_libfabric::shuffle::{ShuffleOptions, Shuffled};
use kvasir_transfer_libfabric::wire::Wire;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::support::{SHM, Setting, Side, TCP, pair, pattern, post, side, until, write_of};

fn many_peers_count_on_one_queue(setting: Setting) {
    const PEERS: u32 = 8;
    const WRITES: u32 = 20;
    let Some(mut target) = side(setting, QueueOptions::default()) else { return };
    let to = target.buffer(PEERS as usize * 1024);
    // A second endpoint on the same queue: half of them write to each.
    let second = Endpoint::open(&target.domain, &target.queue, &target.peers).expect("opened");
    let mut senders: Vec<Side> =
        (0..PEERS).filter_map(|_| side(setting, QueueOptions::default())).collect();
    for (number, sender) in (0_u32..).zip(&mut senders) {
        let from = sender.buffer(1024);
        from.pages.copy_in(0, &[number as u8 + 1; 1024]).expect("inside");
        let name = if number % 2 == 0 { second.name() } else { target.endpoint.name() };
        let peer = sender.peers.insert(name).expect("inserted");
        for index in 0..WRITES {
            let place = (u64::from(number) * 1024, Some(number), u64::from(index));
            let write = write_of(&peer, &from, 1024, to.region.remote(), place);
            post(sender, &mut target, |sender| sender.post(&write));
        }
    }
    for (number, sender) in (0_u32..).zip(&mut senders) {
        until(sender, &mut target, "all of one count", |sender, target| {
            target.arrivals(number) == WRITES as usize
                && (0..u64::from(WRITES)).all(|token| sender.is_done(token))
        });
        let landed = to.pages.copy_out(number as usize * 1024, 1024);
        assert_eq!(landed, Ok(vec![number as u8 + 1; 1024]));
    }
    assert_eq!(target.told.len(), (PEERS * WRITES) as usize);
}

/// Sends `count` writes over shuffled wires, and gives the immediates in the order of their arrival.
fn shuffled(setting: Setting, seed: u64, count: u32) -> Option<Vec<u32>> {
    const BYTES: usize = 10_000;
    let (a, b) = pair(setting)?;
    let (from, to) = (a.buffer(BYTES), b.buffer(BYTES * count as usize));
    from.pages.copy_in(0, &pattern(BYTES, 7)).expect("inside");
    let peer = a.peer(&b);
    let piece_bytes = 4096;
    let options = ShuffleOptions { seed, piece_bytes, ..ShuffleOptions::default() };
    let (Side { endpoint: a, .. }, Side { endpoint: b, .. }) = (a, b);
    let mut sender = Shuffled::new(a, options);
    let mut receiver = Shuffled::new(b, ShuffleOptions { seed: !seed, ..options });
    let (mut done, mut arrived, mut order) = (Vec::new(), Vec::new(), Vec::new());
    let mut next = 0;
    while order.len() < count as usize || done.len() < count as usize {
        while next < count {
            let offset = u64::from(next) * BYTES as u64;
            let write = write_of(
                &peer,
                &from,
                BYTES,
                to.region.remote(),
                (offset, Some(next), u64::from(next)),
            );
            match sender.write(&write) {
                Ok(()) => next += 1,
                Err(PostError::Busy(_)) => break,
                Err(error) => panic!("{error:?}"),
            }
        }
        sender.poll(&mut done, 64).expect("the queue works");
        receiver.poll(&mut arrived, 64).expect("the queue works");
        for told in arrived.drain(..) {
            let Completion::Arrived { immediate: Immediate(number), .. } = told else {
                panic!("{told:?}")
            };
            let landed = to.pages.copy_out(number as usize * BYTES, BYTES).expect("inside");
            assert!(landed == pattern(BYTES, 7), "what counts has landed");
            order.push(number);
        }
    }
    let mut tokens: Vec<u64> = done
        .iter()
        .map(|told| match told {
            Completion::Done { token: Token(token), bytes: BYTES, .. } => *token,
            other => panic!("{other:?}"),
        })
        .collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..u64::from(count)).collect::<Vec<_>>(), "each is done once");
    assert!(!sender.holds_back() && !receiver.holds_back());
    Some(order)
}

fn shuffled_writes_arrive_in_another_order_and_each_once(setting: Setting) {
    for seed in [1, 2] {
        let Some(mut order) = shuffled(setting, seed, 200) else { return };
        let sorted: Vec<u32> = (0..200).collect();
        assert_ne!(order, sorted, "seed {seed}");
        order.sort_unstable();
        assert_eq!(order, sorted, "seed {seed}");
    }
}

fn a_sleeper_wakes_when_a_write_arrives(setting: Setting) {
    let options = QueueOptions { wakeup: Wakeup::Fd, ..QueueOptions::default() };
    let Some(mut b) = side(setting, options) else { return };
    let Some(mut a) = side(setting, QueueOptions::default()) else { return };
    if !setting.has_fd {
        assert_eq!(b.queue.wakeup(), Wakeup::Poll);
        assert!(b.queue.fd().is_none());
        assert_eq!(b.queue.may_sleep(), Ok(false));
        return;
    }
    assert_eq!(b.queue.wakeup(), Wakeup::Fd);
    let (from, to) = (a.buffer(64), b.buffer(64));
    let peer = a.peer(&b);
    let write = |number: u32| {
        let place = (0, Some(number), u64::from(number));
        write_of(&peer, &from, 64, to.region.remote(), place)
    };
    // The first makes the connection, which wants both sides awake.
    post(&mut a, &mut b, |a| a.post(&write(0)));
    until(&mut a, &mut b, "it counts", |a, b| b.arrivals(0) == 1 && a.is_done(0));
    for number in 1..20 {
        std::thread::scope(|threads| {
            let sleeper = threads.spawn(|| {
                while b.arrivals(number) == 0 {
                    b.poll();
                    if b.arrivals(number) == 0 && b.queue.may_sleep().expect("the queue works") {
                        let fd = b.queue.fd().expect("opened with one");
                        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
                        let hangs = Timespec { tv_sec: 30, tv_nsec: 0 };
                        let ready = rustix::event::poll(&mut fds, Some(&hangs)).expect("polls");
                        assert_eq!(ready, 1, "slept through write {number}");
                    }
                }
            });
            while let Err(error) = a.post(&write(number)) {
                assert!(matches!(error, PostError::Busy(_)), "{error:?}");
                a.poll();
            }
            while !a.is_done(u64::from(number)) {
                a.poll();
            }
            sleeper.join().expect("the sleeper saw it");
        });
    }
}

fn threads_share_a_domain(setting: Setting) {
    for threading in [Threading::Safe, Threading::Domain] {
        let setting = Setting { threading, ..setting };
        let Some((a, mut b)) = pair(setting) else { return };
        let (from, to) = (a.buffer(64), b.buffer(64));
        let peer = a.peer(&b);
        const THREADS: u64 = 3;
        const EACH: u64 = 60;
        let told = std::thread::scope(|threads| {
            for thread in 0..THREADS {
                let (a, from, to, peer) = (&a, &from, &to, &peer);
                threads.spawn(move || {
                    for index in 0..EACH {
                        let token = thread * EACH + index;
                        let place = (0, Some(5), token);
                        let write: Write = write_of(peer, from, 64, to.region.remote(), place);
                        while let Err(error) = a.post(&write) {
                            assert!(matches!(error, PostError::Busy(_)), "{error:?}");
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let mut told = Vec::new();
            while told.len() < (THREADS * EACH) as usize || b.arrivals(5) < told.len() {
                a.queue.poll(&mut told, 64).expect("the queue works");
                b.poll();
            }
            told
        });
        let mut tokens: Vec<u64> = told
            .iter()
            .map(|told| match told {
                Completion::Done { token: Token(token), .. } => *token,
                other => panic!("{other:?}"),
            })
            .collect();
        tokens.sort_unstable();
        assert_eq!(tokens, (0..THREADS * EACH).collect::<Vec<_>>(), "{threading:?}");
    }
}

fn an_arrival_says_who_wrote_where_the_provider_knows(setting: Setting) {
    let setting = Setting { arrival_sources: true, ..setting };
    let Some((mut a, mut b)) = pair(setting) else { return };
    let Some(mut c) = side(setting, QueueOptions::default()) else { return };
    let is_known = b.domain.details().arrival_sources;
    assert_eq!(is_known, !b.domain.details().provider.ends_with("ofi_rxm"));
    let to = b.buffer(64);
    let known = (b.peer(&a), b.peer(&c));
    for (number, sender) in [(1, &mut a), (2, &mut c)] {
        let from = sender.buffer(64);
        let write = write_of(
            &sender.peer(&b),
            &from,
            64,
            to.region.remote(),
            (0, Some(number), number.into()),
        );
        post(sender, &mut b, |sender| sender.post(&write));
        until(sender, &mut b, "it counts", |sender, b| {
            b.arrivals(number) == 1 && sender.is_done(number.into())
        });
    }
    for (number, peer) in [(1, known.0), (2, known.1)] {
        let immediate = Immediate(number);
        let from = is_known.then_some(peer.id());
        assert!(b.told.contains(&Completion::Arrived { immediate, from }), "{:?}", b.told);
    }
}

fn a_dma_buf_is_refused_with_the_reason(setting: Setting) {
    let Some(a) = side(setting, QueueOptions::default()) else { return };
    let fd = rustix::fs::memfd_create("no dma-buf", rustix::fs::MemfdFlags::CLOEXEC).expect("made");
    let memory = DmaBuf { fd, offset: 0, bytes: 4096, base: 0, device: Device::Cuda(0) };
    let refused = a.domain.register_dma_buf(memory, Default::default()).expect_err("refused");
    let found = Library::open().expect("it was open").interface();
    match refused {
        RegisterError::NoDmaBuf { needed, found: said } => {
            assert!(found < needed && said == found);
        }
        RegisterError::NoDeviceMemory => assert_eq!(found, ASKED),
        other => panic!("{other:?}"),
    }
}

fn the_provider_is_listed_and_chosen(setting: Setting) {
    let Ok(library) = Library::open() else { return };
    let request = InfoRequest {
        provider: Some(setting.provider.into()),
        source: setting.source.map(String::from),
        ..InfoRequest::default()
    };
    let infos = library.infos(&request).expect("it is here");
    let details = choose(&infos, setting.provider).expect("it is the only one").details();
    let name = details.provider.split(';').next();
    assert_eq!(name, Some(setting.provider));
    assert!(details.immediate_bytes >= 4 && details.message_bytes_max > 1 << 30);
    assert_eq!(details.interface, library.interface());
    let missing = choose(&infos, "verbs").expect_err("it was not asked for");
    assert!(missing.found.contains(&details.provider), "{missing}");
}

over!(over_tcp, TCP,
    many_peers_count_on_one_queue
    shuffled_writes_arrive_in_another_order_and_each_once
    a_sleeper_wakes_when_a_write_arrives
    threads_share_a_domain
    an_arrival_says_who_wrote_where_the_provider_knows
    a_dma_buf_is_refused_with_the_reason
    the_provider_is_listed_and_chosen
);
over!(over_shm, SHM,
    many_peers_count_on_one_queue
    shuffled_writes_arrive_in_another_order_and_each_once
    a_sleeper_wakes_when_a_write_arrives
    threads_share_a_domain
    an_arrival_says_who_wrote_where_the_provider_knows
    a_dma_buf_is_refused_with_the_reason
    the_provider_is_listed_and_chosen
);

#[test]
fn a_provider_that_is_not_here_is_an_error() {
    let Ok(library) = Library::open() else { return };
    assert!(library.version() >= OLDEST && library.interface() <= ASKED);
    let request = InfoRequest { provider: Some("no such".into()), ..InfoRequest::default() };
    assert!(library.infos(&request).is_err());
    let request = InfoRequest { provider: Some("a\0b".into()), ..InfoRequest::default() };
    assert!(library.infos(&request).is_err());
}

#[test]
fn a_host_without_libfabric_is_told_what_to_install() {
    let path = std::path::Path::new("/nowhere/libfabric.so.1");
    // SAFETY: there is nothing to run.
    let missing = unsafe { Library::open_at(path) }.expect_err("nothing is there");
    assert!(missing.to_string().contains("install libfabric1"), "{missing}");
    // SAFETY: the C library is in the process already.
    let other = unsafe { Library::open_at(std::path::Path::new("libc.so.6")) };
    assert!(matches!(other, Err(Unavailable::Incomplete { .. })), "{other:?}");
}
