//! Which network devices are near which memory: a matrix of memory location to preferred and
//! secondary devices (Mooncake, FAST '25, section 3.2.2), read from the system (`sysfs`), written
//! and overridden as JSON, exchanged with peers, and the rule by which devices of two hosts pair up.
//!
//! ```json
//! {"cpu:0": {"preferred": ["mlx5_0"], "secondary": ["mlx5_1"]},
//!  "cuda:0": {"preferred": ["mlx5_1"], "secondary": ["mlx5_0"]}}
//! ```

mod near;
mod place;
mod sysfs;

pub use self::near::{CARDS_MAX, CardSet, LOCATIONS_MAX, Nearness};
pub(crate) use self::place::location_of;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use kvasir_mutation::{Mutation, mutated};
use serde::{Deserialize, Serialize};

/// Where memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Location {
    /// Host memory of a NUMA node, written `cpu:0`.
    Cpu { node: u32 },
    /// Memory of a GPU in the order of PCI addresses, written `cuda:0`.
    Gpu { index: u32 },
}

/// The devices for one memory location.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Preference {
    /// As near as any: used first, all of them.
    pub preferred: Vec<String>,
    /// Farther away: used while no preferred one works.
    pub secondary: Vec<String>,
}

/// The matrix.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(transparent)]
pub struct Topology {
    #[schemars(with = "BTreeMap<String, Preference>")]
    locations: BTreeMap<Location, Preference>,
}

/// Why an override was refused.
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    #[error(
        "the topology is not JSON of the form {{\"cpu:0\": {{\"preferred\": [\"mlx5_0\"]}}}}: {0}"
    )]
    Json(#[from] serde_json::Error),
    #[error("the topology names {device} twice for {location}")]
    Twice { location: Location, device: String },
    #[error("the topology names {device} for {location}, but this host has {}", known.join(", "))]
    Unknown { location: Location, device: String, known: Vec<String> },
}

impl Topology {
    /// Reads this host's devices. Empty where there are no RDMA devices.
    pub fn of_this_host() -> Topology {
        Topology::read(Path::new("/"))
    }

    /// As [`Topology::of_this_host`], with `/sys` and `/proc` below another folder.
    pub fn read(root: &Path) -> Topology {
        sysfs::read(root)
    }

    /// A matrix that somebody wrote, in place of what the system says.
    ///
    /// # Errors
    /// [`TopologyError`] when it is malformed or names a device that is not among `known`.
    pub fn from_json(text: &str, known: &[String]) -> Result<Topology, TopologyError> {
        let topology: Topology = text.parse()?;
        topology.check(known)?;
        Ok(topology)
    }

    /// Whether it names only devices that are `known`, and each once for a location.
    ///
    /// # Errors
    /// [`TopologyError`] for the first that is not so.
    pub fn check(&self, known: &[String]) -> Result<(), TopologyError> {
        for (location, preference) in &self.locations {
            let location = *location;
            let mut seen: Vec<&String> = Vec::new();
            for device in preference.preferred.iter().chain(&preference.secondary) {
                if seen.contains(&device) {
                    return Err(TopologyError::Twice { location, device: device.clone() });
                }
                if !known.contains(device) {
                    let (device, known) = (device.clone(), known.to_vec());
                    return Err(TopologyError::Unknown { location, device, known });
                }
                seen.push(device);
            }
        }
        Ok(())
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings and lists are always JSON")
    }

    pub fn locations(&self) -> impl Iterator<Item = (Location, &Preference)> {
        self.locations.iter().map(|(location, preference)| (*location, preference))
    }

    /// Every device of the matrix, once, sorted.
    pub fn devices(&self) -> Vec<String> {
        let mut devices: Vec<String> = self
            .locations
            .values()
            .flat_map(|preference| preference.preferred.iter().chain(&preference.secondary))
            .cloned()
            .collect();
        devices.sort();
        devices.dedup();
        devices
    }

    /// The devices to use for memory at `location`, of those that work: the preferred ones, or the
    /// secondary ones while no preferred one does.
    pub fn choose(&self, location: Location, works: impl Fn(&str) -> bool) -> Vec<String> {
        let Some(preference) = self.locations.get(&location) else { return Vec::new() };
        let working = |devices: &[String]| -> Vec<String> {
            devices.iter().filter(|device| works(device)).cloned().collect()
        };
        let preferred = working(&preference.preferred);
        if preferred.is_empty() { working(&preference.secondary) } else { preferred }
    }
}

/// How the cards of two engines talk: the i-th of one with the i-th of the other, and where one side has
/// fewer, its cards serve several of the other's in turn. Both sides come to the same pairs. Nothing where
/// one side has none.
pub fn pair<T: Copy>(local: &[T], remote: &[T]) -> Vec<(T, T)> {
    if local.is_empty() || remote.is_empty() {
        return Vec::new();
    }
    let pairs = match mutated(Mutation::ExtraCardsLeftOut) {
        true => local.len().min(remote.len()),
        false => local.len().max(remote.len()),
    };
    (0..pairs).map(|at| (local[at % local.len()], remote[at % remote.len()])).collect()
}

impl Location {
    /// On the wire; 0 is no location.
    pub(crate) fn code(self) -> u64 {
        match self {
            Location::Cpu { node } => 1 << 32 | u64::from(node),
            Location::Gpu { index } => 2 << 32 | u64::from(index),
        }
    }

    pub(crate) fn from_code(code: u64) -> Option<Self> {
        let number = code as u32;
        match code >> 32 {
            1 => Some(Location::Cpu { node: number }),
            2 => Some(Location::Gpu { index: number }),
            _ => None,
        }
    }
}

/// Whether the devices that it names are there is for [`Topology::check`].
impl FromStr for Topology {
    type Err = TopologyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(serde_json::from_str(text)?)
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Cpu { node } => write!(f, "cpu:{node}"),
            Location::Gpu { index } => write!(f, "cuda:{index}"),
        }
    }
}

impl FromStr for Location {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("{text:?} is not a memory location: write cpu:0 or cuda:0");
        let (kind, number) = text.split_once(':').ok_or_else(wrong)?;
        let number = number.parse().map_err(|_| wrong())?;
        match kind {
            "cpu" => Ok(Location::Cpu { node: number }),
            "cuda" => Ok(Location::Gpu { index: number }),
            _ => Err(wrong()),
        }
    }
}

impl TryFrom<String> for Location {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Location> for String {
    fn from(location: Location) -> String {
        location.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(devices: &[&str]) -> Vec<String> {
        devices.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_matrix_reads_back_and_mistakes_in_it_are_named() {
        let known = names(&["mlx5_0", "mlx5_1"]);
        let text = r#"{"cpu:0":{"preferred":["mlx5_0"],"secondary":["mlx5_1"]}}"#;
        let topology = Topology::from_json(text, &known).unwrap();
        assert_eq!(topology.to_json(), text);
        assert_eq!(topology.devices(), known);
        let check = |text: &str, word: &str| {
            let error = Topology::from_json(text, &known).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        };
        check(r#"{"cpu":{}}"#, "cpu:0");
        check(r#"{"cpu:0":{"prefered":[]}}"#, "prefered");
        check(r#"{"cpu:0":{"preferred":["eth9"]}}"#, "mlx5_0, mlx5_1");
        check(r#"{"cpu:0":{"preferred":["mlx5_0"],"secondary":["mlx5_0"]}}"#, "twice");
    }

    #[test]
    fn secondary_devices_serve_while_no_preferred_one_works() {
        let known = names(&["a", "b", "c"]);
        let text = r#"{"cuda:1":{"preferred":["a","b"],"secondary":["c"]}}"#;
        let topology = Topology::from_json(text, &known).unwrap();
        let gpu = Location::Gpu { index: 1 };
        assert_eq!(topology.choose(gpu, |_| true), ["a", "b"]);
        assert_eq!(topology.choose(gpu, |device| device != "a"), ["b"]);
        assert_eq!(topology.choose(gpu, |device| device == "c"), ["c"]);
        assert!(topology.choose(gpu, |_| false).is_empty());
        assert!(topology.choose(Location::Cpu { node: 0 }, |_| true).is_empty());
    }

    #[test]
    fn both_sides_come_to_the_same_pairs() {
        let check = |local: &[char], remote: &[char], expected: &[(char, char)]| {
            let pairs = pair(local, remote);
            assert_eq!(pairs, expected);
            let back = pair(remote, local);
            assert!(pairs.iter().zip(&back).all(|(a, b)| (a.0, a.1) == (b.1, b.0)));
        };
        check(&['a', 'b'], &['x', 'y'], &[('a', 'x'), ('b', 'y')]);
        check(&['a'], &['x', 'y'], &[('a', 'x'), ('a', 'y')]);
        check(&['a', 'b', 'c'], &['x', 'y'], &[('a', 'x'), ('b', 'y'), ('c', 'x')]);
        check(&[], &['x'], &[]);
    }

    #[test]
    fn locations_survive_the_wire() {
        for text in ["cpu:0", "cpu:4294967295", "cuda:3"] {
            let location: Location = text.parse().unwrap();
            assert_eq!(Location::from_code(location.code()), Some(location));
        }
        assert_eq!((Location::from_code(0), Location::from_code(3 << 32)), (None, None));
    }
}
