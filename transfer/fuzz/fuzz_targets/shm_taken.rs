//! See `kvasir_transfer::fuzzing::shm_taken`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_transfer::fuzzing::shm_taken(bytes);
});
