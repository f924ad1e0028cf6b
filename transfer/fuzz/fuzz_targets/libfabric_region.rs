//! See `kvasir_transfer_libfabric::fuzzing::region`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_transfer_libfabric::fuzzing::region(bytes);
});
