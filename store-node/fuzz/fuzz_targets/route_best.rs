//! See `kvasir_route::fuzzing::best`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_route::fuzzing::best(bytes);
});
