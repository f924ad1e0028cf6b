//! Configuration files: one typed struct per daemon, read once, here. Unknown keys are refused
//! with the nearest known one; nothing is rounded or guessed. What the values must satisfy
//! together is said by the daemon that owns them, when it starts.

#[cfg(test)]
mod deployed;
mod keys;
mod reference;

use std::error::Error;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::args::ConfigFlags;
use crate::daemon::Kind;
use crate::output;

pub(crate) use keys::UnknownKey;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("cannot read the configuration {}", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error("invalid configuration {}: {source}", path.display())]
    Malformed { path: PathBuf, source: toml::de::Error },
    #[error("invalid configuration {}: {unknown}", path.display())]
    Unknown { path: PathBuf, unknown: UnknownKey },
    #[error("cannot write the reference configuration to {}", path.display())]
    Unwritable { path: PathBuf, source: std::io::Error },
}

pub(crate) fn load<T: DeserializeOwned + JsonSchema>(path: &Path) -> Result<T, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Unreadable { path: path.into(), source })?;
    parse(path, &text)
}

fn parse<T: DeserializeOwned + JsonSchema>(path: &Path, text: &str) -> Result<T, ConfigError> {
    let malformed = |source| ConfigError::Malformed { path: path.into(), source };
    let table: toml::Table = toml::from_str(text).map_err(malformed)?;
    keys::check(&schemars::schema_for!(T), &table)
        .map_err(|unknown| ConfigError::Unknown { path: path.into(), unknown })?;
    // From the text again, not from the table: its errors quote the line.
    toml::from_str(text).map_err(malformed)
}

/// The command `kvasir config`.
pub(crate) fn print(flags: &ConfigFlags) -> Result<(), Box<dyn Error>> {
    let kinds = Kind::ALL.into_iter().filter(|kind| flags.daemon.is_none_or(|one| one == *kind));
    for kind in kinds {
        let text = reference_of(kind)?;
        match &flags.write {
            None => output::print(&text),
            Some(folder) => {
                let path = folder.join(format!("{}.toml", kind.name()));
                std::fs::write(&path, text)
                    .map_err(|source| ConfigError::Unwritable { path: path.clone(), source })?;
                output::say(&format!("wrote {}", path.display()));
            }
        }
    }
    Ok(())
}

fn reference_of(kind: Kind) -> Result<String, serde_json::Error> {
    match kind {
        Kind::Conductor => reference_text::<kvasir_conductor::Config>(kind),
        Kind::StoreNode => reference_text::<kvasir_store_node::config::Config>(kind),
        Kind::Engine => reference_text::<kvasir_engine_reference::Config>(kind),
    }
}

fn reference_text<T>(kind: Kind) -> Result<String, serde_json::Error>
where
    T: JsonSchema + Serialize + DeserializeOwned + Default,
{
    let defaults = serde_json::to_value(T::default())?;
    let schema = schemars::schema_for!(T);
    Ok(reference::render(kind, &schema, &defaults, &reference::declared_fields::<T>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_reference<T>(kind: Kind)
    where
        T: JsonSchema + Serialize + DeserializeOwned + Default,
    {
        let text = reference_text::<T>(kind).unwrap();
        let read: T = parse(Path::new(kind.name()), &text).unwrap();
        assert_eq!(
            serde_json::to_value(read).unwrap(),
            serde_json::to_value(T::default()).unwrap(),
            "{text}"
        );
    }

    #[test]
    fn every_reference_configuration_reads_back_as_the_defaults() {
        check_reference::<kvasir_conductor::Config>(Kind::Conductor);
        check_reference::<kvasir_store_node::config::Config>(Kind::StoreNode);
        check_reference::<kvasir_engine_reference::Config>(Kind::Engine);
    }

    #[test]
    fn a_missing_file_is_named() {
        let error =
            load::<kvasir_store_node::config::Config>(Path::new("no/such.toml")).unwrap_err();
        assert!(error.to_string().contains("no/such.toml"), "{error}");
    }

    #[test]
    fn a_wrong_type_is_quoted_with_its_line() {
        let error =
            parse::<kvasir_store_node::config::Config>(Path::new("x"), "dram_bytes = \"much\"")
                .unwrap_err()
                .to_string();
        assert!(error.contains("dram_bytes") && error.contains("line 1"), "{error}");
    }
}
