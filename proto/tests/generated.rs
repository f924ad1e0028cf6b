//! The checked-in code is what the `.proto` files generate.

#[path = "support/generate.rs"]
mod generate;

#[test]
fn checked_in_code_is_up_to_date() {
    let out = tempfile::tempdir().expect("a temporary folder");
    generate::into(out.path());
    let name = "kvasir.v1.rs";
    let fresh = std::fs::read_to_string(out.path().join(name)).expect("generated file");
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let checked_in =
        std::fs::read_to_string(root.join("src/generated").join(name)).expect("checked-in file");
    assert!(
        fresh == checked_in,
        "src/generated/{name} is stale: cargo run -p kvasir-proto --example regenerate"
    );
}
