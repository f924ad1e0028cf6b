//! See `kvasir_transfer::fuzzing::closing_question`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_transfer::fuzzing::closing_question(bytes);
});
