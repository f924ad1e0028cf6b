//! See `kvasir_transfer::fuzzing::endpoint`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_transfer::fuzzing::endpoint(bytes);
});
