//! See `kvasir_store_node::fuzzing::object_name`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_store_node::fuzzing::object_name(bytes);
});
