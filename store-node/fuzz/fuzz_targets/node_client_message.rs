//! See `kvasir_store_node::fuzzing::client_message`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvasir_store_node::fuzzing::client_message(bytes);
});
