//! See `kvasir_route::fuzzing::partials`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_route::fuzzing::partials(bytes);
});
