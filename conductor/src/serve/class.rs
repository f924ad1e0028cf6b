//! What becomes of a prompt's blocks when its request is over, as requests, API keys and callers of
//! the scheduler say it.

use kvasir_proto::v1;
use serde::Deserialize;

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CacheClass {
    /// They are kept as long as there is room.
    #[default]
    Normal,
    /// They are not kept, and nobody else finds them.
    Ephemeral,
}

impl CacheClass {
    pub(crate) const ALL: [CacheClass; 2] = [CacheClass::Normal, CacheClass::Ephemeral];

    /// As files of keys and requests have it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            CacheClass::Normal => "normal",
            CacheClass::Ephemeral => "ephemeral",
        }
    }

    /// The one of this name.
    pub(crate) fn named(name: &str) -> Option<CacheClass> {
        CacheClass::ALL.into_iter().find(|class| class.name() == name)
    }

    pub(crate) fn to_wire(self) -> v1::CacheClass {
        match self {
            CacheClass::Normal => v1::CacheClass::Normal,
            CacheClass::Ephemeral => v1::CacheClass::Ephemeral,
        }
    }

    /// What is unspecified is normal; what is unknown is none.
    pub(crate) fn from_wire(class: i32) -> Option<CacheClass> {
        match v1::CacheClass::try_from(class).ok()? {
            v1::CacheClass::Unspecified | v1::CacheClass::Normal => Some(CacheClass::Normal),
            v1::CacheClass::Ephemeral => Some(CacheClass::Ephemeral),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_the_same_by_name_and_on_the_wire() {
        for class in CacheClass::ALL {
            assert_eq!(CacheClass::named(class.name()), Some(class));
            assert_eq!(CacheClass::from_wire(class.to_wire().into()), Some(class));
        }
        assert_eq!(CacheClass::from_wire(0), Some(CacheClass::Normal));
        for unknown in [-1, 3] {
            assert_eq!(CacheClass::from_wire(unknown), None, "{unknown}");
        }
    }
}
