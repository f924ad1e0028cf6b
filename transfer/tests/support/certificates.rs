//! Authorities, certificates and keys of engines, made for one test.

use std::path::Path;

use kvasir_transfer::TlsFiles;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

/// The name that certificates are valid for.
pub(crate) const NAME: &str = "engine.test";

/// Who says who is of the cluster.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).expect("signed").pem();
        Authority { issuer: Issuer::new(params, key), pem }
    }

    /// Files for one more engine, in a folder of their own.
    pub(crate) fn files(&self, folder: &Path) -> TlsFiles {
        self.files_for(NAME, folder)
    }

    pub(crate) fn files_for(&self, name: &str, folder: &Path) -> TlsFiles {
        std::fs::create_dir_all(folder).expect("a folder");
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        let certificate = params.signed_by(&key, &self.issuer).expect("signed").pem();
        let write = |file: &str, text: &str| {
            let path = folder.join(file);
            std::fs::write(&path, text).expect("written");
            path
        };
        TlsFiles {
            certificate: write("certificate.pem", &certificate),
            key: write("key.pem", &key.serialize_pem()),
            authority: write("authority.pem", &self.pem),
            name: NAME.to_owned(),
        }
    }
}
