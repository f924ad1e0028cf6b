//! The reference configurations in `configs/` are what the code says. After a change of a
//! configuration: `cargo run -- config --write configs`.

use std::path::Path;
use std::process::Command;

#[test]
fn the_reference_configurations_are_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    for daemon in ["conductor", "store-node", "engine"] {
        let output = Command::new(env!("CARGO_BIN_EXE_kvasir"))
            .args(["config", daemon])
            .output()
            .expect("the binary can be started");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let path = folder.join(format!("{daemon}.toml"));
        let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            String::from_utf8_lossy(&output.stdout) == checked_in,
            "{} is stale: cargo run -- config --write configs",
            path.display()
        );
    }
}
