//! Descriptors of other versions: newer ones that only say more are understood, others are refused with a
//! word about both versions.

use kvasir_transfer::{Endpoint, RegionDesc, WireError};

use crate::engine::{region, start, tcp_config};

/// An endpoint and a region's descriptor, as they are handed on.
fn descriptors() -> [Vec<u8>; 2] {
    let (engine, _) = start(tcp_config());
    let (_, region) = engine.register(region(4096)).expect("room");
    [engine.endpoint().to_bytes(), region.to_bytes()]
}

/// A varint of field 1, which is the version in both.
const VERSION: u8 = 0x08;

#[test]
fn fields_that_are_not_known_yet_are_passed_over() {
    let [endpoint, region] = descriptors();
    // Of later fields: a number, eight bytes, and a string.
    let more = [&[0xf8, 0x06, 7][..], &[0xf9, 0x07], &[1; 8], &[0xfa, 0x08, 3], b"new"].concat();
    let longer = |bytes: &[u8]| [bytes, &more].concat();
    let known = Endpoint::from_bytes(&endpoint).expect("an endpoint");
    assert_eq!(Endpoint::from_bytes(&longer(&endpoint)).expect("it says more"), known);
    let known = RegionDesc::from_bytes(&region).expect("a region");
    assert_eq!(RegionDesc::from_bytes(&longer(&region)).expect("it says more"), known);
    // Wherever they stand.
    let first = [more.as_slice(), &region].concat();
    assert_eq!(RegionDesc::from_bytes(&first).expect("it says more"), known);
}

#[test]
fn another_version_is_refused_with_a_word_about_both() {
    for version in [0, 99] {
        let [endpoint, region] = descriptors().map(|mut bytes| {
            assert_eq!(bytes[0], VERSION, "the version comes first");
            bytes[1] = version;
            bytes
        });
        let check = |error: WireError| {
            let WireError::Version { got, .. } = error else { panic!("{error:?}") };
            assert_eq!(got, u32::from(version));
            let text = error.to_string();
            assert!(
                text.contains(&format!("has version {version}, but this program supports version")),
                "{text}"
            );
        };
        check(Endpoint::from_bytes(&endpoint).expect_err("another version"));
        check(RegionDesc::from_bytes(&region).expect_err("another version"));
    }
}

#[test]
fn bytes_that_say_no_version_are_of_none() {
    for bytes in [&[][..], &[0x10, 1]] {
        let error = RegionDesc::from_bytes(bytes).expect_err("no version");
        assert!(matches!(error, WireError::Version { got: 0, .. } | WireError::Decode(_)));
        assert!(Endpoint::from_bytes(bytes).is_err());
    }
}
