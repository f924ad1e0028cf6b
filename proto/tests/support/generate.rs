//! Generates the protobuf code with protox, so that no system protoc is needed.

use std::path::Path;

/// Generates `kvasir.v1.rs` into `out`.
pub(crate) fn into(out: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files: Vec<_> =
        ["common", "node", "admin", "attach", "objects", "engine", "conductor", "route"]
            .iter()
            .map(|name| root.join(format!("kvasir/v1/{name}.proto")))
            .collect();
    let descriptors = protox::compile(&files, [root]).expect("the .proto files compile");
    tonic_prost_build::configure()
        .out_dir(out)
        .client_mod_attribute(".", "#[cfg(feature = \"services\")]")
        .server_mod_attribute(".", "#[cfg(feature = \"services\")]")
        .compile_fds(descriptors)
        .expect("the generated code can be written");
}
