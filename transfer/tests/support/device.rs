//! The RDMA device that tests of `verbs` run on. `tests/verbs-vm/run` provides one.

use std::io::Write;
use std::sync::OnceLock;

use kvasir_transfer::{Handlers, TransferConfig, TransferEngine, VerbsConfig};

#[expect(clippy::disallowed_methods, reason = "how whoever runs the tests names their device")]
fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// One that was named must work; otherwise the first that does is taken. `None`, with a sentence, where
/// there is none.
pub fn named() -> Option<&'static VerbsConfig> {
    static DEVICE: OnceLock<Option<VerbsConfig>> = OnceLock::new();
    DEVICE.get_or_init(find).as_ref()
}

fn find() -> Option<VerbsConfig> {
    let device = setting("KVASIR_VERBS_LOOPBACK");
    let is_named = device.is_some();
    let verbs = VerbsConfig { device, ..VerbsConfig::default() };
    let config = TransferConfig {
        tcp_listen: Some(([127, 0, 0, 1], 0).into()),
        verbs: Some(verbs.clone()),
        ..TransferConfig::default()
    };
    match TransferEngine::start(config, Handlers::default(), &prometheus::Registry::new()) {
        Ok(_) => Some(verbs),
        Err(error) if is_named => panic!("the named device: {error}"),
        Err(error) => {
            let remedy = "`tests/verbs-vm/run` runs them in a virtual machine";
            writeln!(std::io::stderr(), "tests of RDMA are skipped: {error}; {remedy}").ok();
            None
        }
    }
}
