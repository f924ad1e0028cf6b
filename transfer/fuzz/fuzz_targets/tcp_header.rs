//! See `kvasir_transfer::fuzzing::tcp_header`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_transfer::fuzzing::tcp_header(bytes);
});
