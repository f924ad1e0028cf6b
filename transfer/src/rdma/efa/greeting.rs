//! What peers tell each other of their cards. In an endpoint: which provider it is, and for `shm` on which
//! host, which decides whether a connection is tried. Over the connection, by the end that is written to: the
//! name of its endpoint, and a place where nothing is kept, for trials.

use kvasir_transfer_libfabric::address::EndpointName;
use kvasir_transfer_libfabric::region::RemoteRegion;

/// Longer ones no provider has.
const NAME_BYTES_MAX: usize = 256;

/// The end of a pipe that is written to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Greeting {
    pub(crate) name: EndpointName,
    /// Anybody may write here, and nobody reads it.
    pub(crate) trial: RemoteRegion,
}

impl Greeting {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        [self.trial.to_bytes().as_slice(), &self.name.0].concat()
    }

    /// `None` for what no end tells.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (trial, name) = bytes.split_first_chunk::<{ RemoteRegion::WIRE_BYTES }>()?;
        let trial = RemoteRegion::from_bytes(*trial);
        let fits = (1..=NAME_BYTES_MAX).contains(&name.len()) && trial.at(0, 1).is_ok();
        fits.then(|| Greeting { name: EndpointName(name.to_vec()), trial })
    }
}

/// As it stands in endpoints. `host` is empty where it does not matter.
pub(super) fn address(provider: &str, host: &str) -> Vec<u8> {
    format!("{provider} {host}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_transfer_libfabric::region::RemoteKey;

    fn greeting(bytes: u64, name: usize) -> Greeting {
        let trial = RemoteRegion { base: 1 << 40, key: RemoteKey(7), bytes };
        Greeting { name: EndpointName(vec![b'n'; name]), trial }
    }

    #[test]
    fn a_greeting_survives_the_wire() {
        let greeting = greeting(64, 32);
        assert_eq!(Greeting::from_bytes(&greeting.to_bytes()), Some(greeting));
    }

    #[test]
    fn what_no_end_tells_is_not_read() {
        for greeting in [greeting(0, 32), greeting(64, 0), greeting(64, NAME_BYTES_MAX + 1)] {
            assert_eq!(Greeting::from_bytes(&greeting.to_bytes()), None);
        }
        assert_eq!(Greeting::from_bytes(&greeting(64, 32).to_bytes()[..23]), None);
    }
}
