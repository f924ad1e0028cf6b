//! The RDMA device that tests of `verbs` run on. `tests/verbs-vm/run` provides one.

use std::io::Write;
use std::sync::OnceLock;

use kvasir_transfer::{Handlers, TransferConfig, TransferEngine, VerbsConfig};

#[expect(clippy::disallowed_methods, reason = "how whoever runs the tests names their device")]
pub(crate) fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// One that was named must work; otherwise the first that does is taken. `None`, with a sentence, where
/// there is none.
pub(crate) fn named() -> Option<&'static VerbsConfig> {
    static DEVICE: OnceLock<Option<VerbsConfig>> = OnceLock::new();
    DEVICE.get_or_init(find).as_ref()
}

/// Two devices with a wire between them.
pub(crate) fn wire() -> Option<(String, String)> {
    // Where there is no device at all, that is the reason to give.
    named()?;
    let Some(names) = setting("KVASIR_VERBS_WIRE") else {
        let missing = "KVASIR_VERBS_WIRE does not name two devices that are connected";
        writeln!(std::io::stderr(), "a test of RDMA is skipped: {missing}").ok();
        return None;
    };
    let (a, b) = names.split_once(',').expect("two devices: `rxe1,rxe2`");
    Some((a.to_owned(), b.to_owned()))
}

pub(crate) fn wire_is_slow() -> bool {
    setting("KVASIR_VERBS_WIRE_IS_SLOW").as_deref() == Some("1")
}

fn find() -> Option<VerbsConfig> {
    let device = setting("KVASIR_VERBS_LOOPBACK");
    let is_named = device.is_some();
    let devices = device.map(|name| name.parse().expect("a device's name"));
    let verbs = VerbsConfig { devices: devices.into_iter().collect(), ..VerbsConfig::default() };
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
