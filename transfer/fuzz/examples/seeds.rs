//! Writes the inputs that each target begins with, below `corpus`, where the fuzzer looks for them.

use kvasir_transfer::fuzzing::TARGETS;

fn main() -> std::io::Result<()> {
    for target in &TARGETS {
        let folder = std::path::Path::new("corpus").join(target.name);
        std::fs::create_dir_all(&folder)?;
        for (number, seed) in (target.seeds)().iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{number}")), seed)?;
        }
    }
    Ok(())
}
