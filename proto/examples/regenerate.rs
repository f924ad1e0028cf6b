//! Writes `src/generated/` anew from the `.proto` files:
//! `cargo run -p kvasir-proto --example regenerate`.

#[path = "../tests/support/generate.rs"]
mod generate;

fn main() {
    let out = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/generated");
    generate::into(&out);
}
