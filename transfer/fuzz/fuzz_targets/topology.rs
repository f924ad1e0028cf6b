//! See `kvasir_transfer::fuzzing::topology`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_transfer::fuzzing::topology(bytes);
});
