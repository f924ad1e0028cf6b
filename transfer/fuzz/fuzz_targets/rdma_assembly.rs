//! See `kvasir_transfer::fuzzing::rdma_assembly`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_transfer::fuzzing::rdma_assembly(bytes);
});
