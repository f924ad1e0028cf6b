//! A second conductor in front of a cluster's nodes, which asks for the keys of two tenants, `a` and `b`.

use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::cluster::{Cluster, KVASIR};
use super::{eventually, own_address};

/// See the module.
pub(crate) struct Keyed {
    process: Child,
    pub url: String,
    client: reqwest::Client,
    _folder: tempfile::TempDir,
}

impl Drop for Keyed {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Keyed {
    pub(crate) async fn start(cluster: &Cluster) -> Keyed {
        let folder = tempfile::tempdir().expect("a folder");
        let mut keys = String::new();
        for name in ["a", "b"] {
            std::fs::write(folder.path().join(name), format!("key-of-{name}")).expect("written");
            keys += &format!("[[tenants]]\nname = \"{name}\"\nkeys = [{{ file = \"{name}\" }}]\n");
        }
        let keys_file = folder.path().join("keys.toml");
        std::fs::write(&keys_file, keys).expect("written");
        let config = std::fs::read_to_string(cluster.run_dir().join("conductor.toml"));
        let mut config: toml::Table = config.expect("its file").parse().expect("TOML");
        let address = own_address();
        config.insert("listen".into(), address.clone().into());
        config.insert("grpc_listen".into(), own_address().into());
        config.insert("monitor_listen".into(), own_address().into());
        config.insert("api_keys_file".into(), keys_file.to_str().expect("a path").into());
        let file = folder.path().join("conductor.toml");
        std::fs::write(&file, config.to_string()).expect("written");
        let process = Command::new(KVASIR)
            .args(["conductor", "--config"])
            .arg(&file)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it can be started");
        let (url, client) = (format!("http://{address}"), cluster.client.clone());
        let keyed = Keyed { process, url, client, _folder: folder };
        eventually("the second conductor is ready", async || {
            keyed.send("GET", "/readyz", "a", None).await.0 == 200
        })
        .await;
        keyed
    }

    pub(crate) fn request(
        &self,
        method: &str,
        path: &str,
        tenant: &str,
    ) -> reqwest::RequestBuilder {
        let method = method.parse().expect("a method");
        let request = self.client.request(method, format!("{}{path}", self.url));
        request.bearer_auth(format!("key-of-{tenant}"))
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        tenant: &str,
        body: Option<Value>,
    ) -> (u16, Value) {
        let request = self.request(method, path, tenant);
        let request = match body {
            Some(body) => request.json(&body),
            None => request,
        };
        match request.send().await {
            Ok(reply) => (reply.status().as_u16(), reply.json().await.unwrap_or_default()),
            Err(_) => (0, Value::Null),
        }
    }
}
