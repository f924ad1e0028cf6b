//! What a device says of itself, and what it takes for memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvasir_transfer_verbs::{
    Buffer, DmaBuf, GidKind, LinkLayer, Memory, Mtu, PortState, RegionOptions, Transport,
    VerbsError,
};

use crate::support::Lab;

#[test]
fn a_device_describes_itself_and_its_ports() {
    let Some(lab) = Lab::open() else { return };
    let info = lab.context.describe().expect("answers");
    assert_eq!(info.name, lab.context.name());
    assert_eq!(info.transport, Transport::InfiniBand);
    assert!(info.limits.queue_pairs_max > 0 && info.limits.completions_max > 0);
    assert!(info.limits.slices_max > 0 && info.limits.region_bytes_max > 0);
    let port = info.ports.iter().find(|port| port.port == lab.path.port).expect("the port in use");
    assert_eq!(port.state, PortState::Active);
    assert!(port.mtu_active <= port.mtu_max && port.mtu_active >= Mtu::Bytes256);
    let gid = port.gids.iter().find(|entry| entry.index == lab.path.gid_index);
    let gid = gid.expect("the address in use");
    assert_eq!(gid.gid, lab.path.gid);
    if port.link_layer == LinkLayer::Ethernet {
        assert_eq!(gid.kind, GidKind::RoceV2);
    }
    assert!(lab.context.next_event().expect("no waiting").is_none());
}

#[test]
fn what_a_device_is_said_to_take_it_takes() {
    let Some(lab) = Lab::open() else { return };
    let can = lab.pd.probe().expect("can be tried");
    let buffer: Arc<dyn Memory> = Arc::new(Buffer::new(8192).expect("memory"));
    let relaxed = RegionOptions { relaxed_ordering: true, ..RegionOptions::SHARED };
    let registered = lab.pd.register(Arc::clone(&buffer), 0..8192, relaxed);
    assert_eq!(registered.is_ok(), can.relaxed_ordering);

    // A file is no dma-buf: refused everywhere, but not as unsupported where dma-bufs are supported.
    let fd = OwnedFd::from(std::fs::File::open("/dev/null").expect("every host has it"));
    let no_buffer = DmaBuf { fd, offset: 0, bytes: 4096, address: 0 };
    let refused = lab.pd.register_dmabuf(no_buffer, RegionOptions::SHARED);
    let is_unsupported = matches!(refused, Err(VerbsError::Unsupported { .. }));
    assert!(refused.is_err());
    assert_eq!(is_unsupported, !can.dmabuf);
}

#[test]
fn a_range_outside_the_memory_is_refused() {
    let Some(lab) = Lab::open() else { return };
    let buffer: Arc<dyn Memory> = Arc::new(Buffer::new(8192).expect("memory"));
    let inverted = std::ops::Range { start: 5, end: 4 };
    for range in [0..8193, 8192..8193, 0..0, inverted] {
        let refused = lab.pd.register(Arc::clone(&buffer), range.clone(), RegionOptions::SHARED);
        assert!(matches!(refused, Err(VerbsError::Range(_))), "{range:?}: {refused:?}");
    }
    let half = lab.pd.register(buffer, 4096..8192, RegionOptions::SHARED).expect("its second half");
    assert_eq!((half.bytes(), half.remote().bytes), (4096, 4096));
    assert!(half.slice(0, 4096).is_ok());
    assert!(half.slice(1, 4096).is_err());
}

#[test]
fn a_region_keeps_its_memory_until_it_is_dropped() {
    let Some(lab) = Lab::open() else { return };
    let buffer = Arc::new(Buffer::new(4096).expect("memory"));
    let owner = Arc::clone(&buffer);
    let region = lab.pd.register(owner, 0..4096, RegionOptions::SHARED).expect("registered");
    assert_eq!(Arc::strong_count(&buffer), 2);
    drop(region);
    assert_eq!(Arc::strong_count(&buffer), 1);
}
