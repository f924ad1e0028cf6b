//! See `kvasir_transfer::fuzzing::shm_region_answer`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_transfer::fuzzing::shm_region_answer(bytes);
});
