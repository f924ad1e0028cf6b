//! What requests to an object store are signed with. It is never printed.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use object_store::CredentialProvider;
use object_store::aws::AwsCredential;

use crate::config::Keys;

/// How long what a file said is taken for true: such keys are replaced from time to time.
const READ_AGAIN: Duration = Duration::from_secs(60);

/// The keys as the library of object stores takes them.
pub(super) fn credential(keys: Keys) -> AwsCredential {
    let Keys { access_key_id, secret_access_key, session_token } = keys;
    AwsCredential { key_id: access_key_id, secret_key: secret_access_key, token: session_token }
}

/// Keys that stand in a file, which is read again now and then.
#[derive(Debug)]
pub(super) struct KeysOfFile {
    path: PathBuf,
    known: Mutex<Option<(Instant, Arc<AwsCredential>)>>,
}

impl KeysOfFile {
    pub(super) fn new(path: PathBuf) -> Self {
        KeysOfFile { path, known: Mutex::new(None) }
    }

    fn read(&self) -> Result<Arc<AwsCredential>, WrongFile> {
        let wrong = |why: String| WrongFile { path: self.path.clone(), why };
        let text = std::fs::read_to_string(&self.path).map_err(|error| wrong(error.to_string()))?;
        // What TOML says of an error quotes the line, which may be the secret.
        let keys: Keys = toml::from_str(&text).map_err(|_| {
            wrong(
                "the file must set `access_key_id` and `secret_access_key` in TOML, and may set \
                 `session_token`"
                    .into(),
            )
        })?;
        Ok(Arc::new(credential(keys)))
    }
}

/// Why a file of keys is of no use.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the credentials in {}: {why}", path.display())]
struct WrongFile {
    path: PathBuf,
    why: String,
}

#[tonic::async_trait]
impl CredentialProvider for KeysOfFile {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((read, keys)) = &*known
            && read.elapsed() < READ_AGAIN
        {
            return Ok(Arc::clone(keys));
        }
        let keys = self.read().map_err(|error| object_store::Error::Generic {
            store: "S3",
            source: Box::new(error),
        })?;
        *known = Some((Instant::now(), Arc::clone(&keys)));
        Ok(keys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn keys_of_a_file_are_read_and_nothing_tells_them() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("keys.toml");
        let keys = KeysOfFile::new(path.clone());
        keys.get_credential().await.expect_err("there is no file");
        std::fs::write(&path, "access_key_id = \"me\"\nsecret_access_key = \"hush")
            .expect("written");
        let wrong = keys.get_credential().await.expect_err("it is no TOML").to_string();
        assert!(wrong.contains("keys.toml") && !wrong.contains("hush"), "{wrong}");
        std::fs::write(&path, "access_key_id = \"me\"\nsecret_access_key = \"hush\"")
            .expect("written");
        let read = keys.get_credential().await.expect("it is right");
        assert_eq!((read.key_id.as_str(), read.secret_key.as_str()), ("me", "hush"));
        let keys = Keys {
            access_key_id: "me".into(),
            secret_access_key: "hush".into(),
            session_token: Some("hush".into()),
        };
        assert!(!format!("{keys:?}").contains("hush"));
        let config = crate::config::ObjectStore { keys: Some(keys), ..Default::default() };
        assert!(!format!("{config:?}").contains("hush"));
        assert!(!toml::to_string(&config).expect("TOML").contains("hush"));
    }
}
