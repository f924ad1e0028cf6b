//! See `kvasir_transfer::fuzzing::hello_reply`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_transfer::fuzzing::hello_reply(bytes);
});
