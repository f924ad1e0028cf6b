//! See `kvasir_transfer::fuzzing::efa_greeting`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_transfer::fuzzing::efa_greeting(bytes);
});
