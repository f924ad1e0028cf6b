//! See `kvasir_attach::fuzzing::message`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_attach::fuzzing::message(bytes);
});
