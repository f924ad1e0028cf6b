//! A second conductor over a cluster's nodes, at addresses that stay its own when it is killed and
//! started again.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::cluster::{Cluster, KVASIR};
use super::{eventually, own_address};

#[derive(Debug)]
pub(crate) struct Second {
    child: Child,
    config: PathBuf,
    log: PathBuf,
    pub url: String,
    pub watch: String,
}

impl Second {
    /// Returns when it is ready.
    pub(crate) async fn start(cluster: &Cluster) -> Second {
        let text = std::fs::read_to_string(cluster.run_dir().join("conductor.toml"));
        let mut table: toml::Table = text.expect("its configuration").parse().expect("TOML");
        let mut address = |field: &str| {
            let address = own_address();
            table.insert(field.into(), address.clone().into());
            address
        };
        let (listen, watch) = (address("listen"), address("monitor_listen"));
        address("grpc_listen");
        let config = cluster.run_dir().join("second.toml");
        std::fs::write(&config, table.to_string()).expect("written");
        let log = cluster.run_dir().join("second.log");
        let child = spawn(&config, &log);
        let (url, watch) = (format!("http://{listen}"), format!("http://{watch}"));
        let second = Second { child, config, log, url, watch };
        eventually("the second conductor is ready", async || {
            second.answers(&cluster.client, "/readyz").await
        })
        .await;
        second
    }

    /// Whether a path is answered with 200.
    pub(crate) async fn answers(&self, client: &reqwest::Client, path: &str) -> bool {
        let reply = client.get(format!("{}{path}", self.url)).send().await;
        reply.is_ok_and(|reply| reply.status() == 200)
    }

    /// With SIGKILL. It is dead when this returns, and its connections are closed.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it is our child");
    }

    /// Starts a killed one again, and does not wait for it.
    pub(crate) fn start_again(&mut self) {
        self.child = spawn(&self.config, &self.log);
    }
}

fn spawn(config: &Path, log: &Path) -> Child {
    let log = std::fs::File::options().create(true).append(true).open(log).expect("a file");
    let mut command = Command::new(KVASIR);
    command.args(["conductor", "--config"]).arg(config).stdin(Stdio::null());
    command.stdout(log.try_clone().expect("a handle")).stderr(log);
    command.spawn().expect("the binary can be started")
}

impl Drop for Second {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
