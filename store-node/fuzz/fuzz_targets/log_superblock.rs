//! See `kvasir_log::fuzzing::superblock`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_log::fuzzing::superblock(bytes);
});
