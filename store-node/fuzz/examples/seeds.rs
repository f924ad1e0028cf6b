//! Writes the inputs that each target begins with below `corpus`, where the fuzzer looks for them.

use kvasir_fuzzing::Target;

fn main() -> std::io::Result<()> {
    let all: [&[Target]; 5] = [
        &kvasir_attach::fuzzing::TARGETS,
        &kvasir_blocks::fuzzing::TARGETS,
        &kvasir_log::fuzzing::TARGETS,
        &kvasir_route::fuzzing::TARGETS,
        &kvasir_store_node::fuzzing::TARGETS,
    ];
    for target in all.into_iter().flatten() {
        let folder = std::path::Path::new("corpus").join(target.name);
        std::fs::create_dir_all(&folder)?;
        for (number, seed) in (target.seeds)().iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{number}")), seed)?;
        }
    }
    Ok(())
}
