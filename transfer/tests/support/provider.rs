//! libfabric's providers that the tests of `efa` run over, with disorder in between. Debian's `libfabric1` has
//! them.

use std::io::Write;
use std::sync::OnceLock;

use kvasir_transfer::{EfaConfig, Handlers, TransferConfig, TransferEngine};

/// Needs no hardware.
pub(crate) const TCP: &str = "tcp";
/// As above, between processes of one host.
pub(crate) const SHM: &str = "shm";

/// `None`, with a sentence, where the provider is not there.
pub(crate) fn shuffled(provider: &'static str) -> Option<&'static EfaConfig> {
    static FOUND: [OnceLock<Option<EfaConfig>>; 2] = [OnceLock::new(), OnceLock::new()];
    FOUND[usize::from(provider == SHM)].get_or_init(|| find(provider)).as_ref()
}

fn find(provider: &str) -> Option<EfaConfig> {
    let efa = EfaConfig {
        provider: provider.to_owned(),
        address: (provider == TCP).then(|| "127.0.0.1".to_owned()),
        shuffle_seed: Some(7),
        ..EfaConfig::default()
    };
    let config = TransferConfig {
        tcp_listen: Some(([127, 0, 0, 1], 0).into()),
        efa: Some(efa.clone()),
        ..TransferConfig::default()
    };
    match TransferEngine::start(config, Handlers::default(), &prometheus::Registry::new()) {
        Ok(_) => Some(efa),
        Err(error) => {
            let remedy = "`apt-get install libfabric1` brings what they need";
            writeln!(std::io::stderr(), "tests of efa are skipped: {error}; {remedy}").ok();
            None
        }
    }
}
