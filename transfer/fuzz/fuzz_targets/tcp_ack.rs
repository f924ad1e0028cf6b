//! See `kvasir_transfer::fuzzing::tcp_ack`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_transfer::fuzzing::tcp_ack(bytes);
});
