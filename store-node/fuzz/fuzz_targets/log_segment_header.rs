//! See `kvasir_log::fuzzing::segment_header`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_log::fuzzing::segment_header(bytes);
});
