//! See `kvasir_log::fuzzing::extent`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_log::fuzzing::extent(bytes);
});
