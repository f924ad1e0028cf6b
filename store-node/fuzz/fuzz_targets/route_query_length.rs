//! See `kvasir_route::fuzzing::length`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_route::fuzzing::length(bytes);
});
