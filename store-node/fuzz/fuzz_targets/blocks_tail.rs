//! See `kvasir_blocks::fuzzing::tail`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_blocks::fuzzing::tail(bytes);
});
