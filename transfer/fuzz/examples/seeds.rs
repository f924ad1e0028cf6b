//! Writes the inputs that each target begins with, below `corpus`, where the fuzzer looks for them. A target
//! whose every input is short and of fixed length has an empty folder.

use kvasir_transfer::fuzzing::TARGETS;

fn main() -> std::io::Result<()> {
    for source in std::fs::read_dir("fuzz_targets")? {
        if let Some(target) = source?.path().file_stem() {
            std::fs::create_dir_all(std::path::Path::new("corpus").join(target))?;
        }
    }
    for target in &TARGETS {
        let folder = std::path::Path::new("corpus").join(target.name);
        std::fs::create_dir_all(&folder)?;
        for (number, seed) in (target.seeds)().iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{number}")), seed)?;
        }
    }
    Ok(())
}
