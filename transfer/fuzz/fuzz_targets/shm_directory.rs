//! See `kvasir_transfer::fuzzing::shm_directory`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_transfer::fuzzing::shm_directory(bytes);
});
