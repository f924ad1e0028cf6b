//! See `kvasir_transfer_verbs::fuzzing::address`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_transfer_verbs::fuzzing::address(bytes);
});
