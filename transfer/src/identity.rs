//! Who an engine is: a pair of keys, drawn when it starts. Its incarnation is a digest of the public one,
//! and what it says first on every connection is signed: whoever names another engine's incarnation, which
//! stands in each of its descriptors, cannot prove to be it.

use kvasir_mutation::{Mutation, mutated};
use ring::digest::{SHA256, digest};
use ring::error::Unspecified;
use ring::rand::SystemRandom;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};

/// What is signed is nothing else than a hello.
const CONTEXT: &[u8] = b"kvasir-transfer hello\0";

/// See the module.
pub(crate) struct Identity {
    pair: Ed25519KeyPair,
    incarnation: u64,
}

impl Identity {
    /// # Errors
    /// The system has no random bytes.
    pub(crate) fn draw() -> Result<Identity, Unspecified> {
        let random = SystemRandom::new();
        loop {
            let seed: [u8; 32] = ring::rand::generate(&random)?.expose();
            let identity = Identity::from_seed(&seed);
            // 0 means "none" wherever an incarnation is optional.
            if identity.incarnation != 0 {
                return Ok(identity);
            }
        }
    }

    pub(crate) fn from_seed(seed: &[u8; 32]) -> Identity {
        let pair = Ed25519KeyPair::from_seed_unchecked(seed).expect("a seed is 32 bytes long");
        let incarnation = incarnation_of(pair.public_key().as_ref());
        Identity { pair, incarnation }
    }

    pub(crate) fn incarnation(&self) -> u64 {
        self.incarnation
    }

    pub(crate) fn public_key(&self) -> &[u8] {
        self.pair.public_key().as_ref()
    }

    /// 64 bytes.
    pub(crate) fn sign(&self, hello: &[u8]) -> Vec<u8> {
        self.pair.sign(&in_context(hello)).as_ref().to_vec()
    }
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity({:016x})", self.incarnation)
    }
}

/// Whether the engine of this incarnation has signed the hello.
pub(crate) fn is_signed(incarnation: u64, key: &[u8], hello: &[u8], signature: &[u8]) -> bool {
    (incarnation_of(key) == incarnation || mutated(Mutation::IdentityNotChecked))
        && UnparsedPublicKey::new(&ED25519, key).verify(&in_context(hello), signature).is_ok()
}

/// 64 bits: to find a second key with the same takes 2^64 attempts in the mean.
fn incarnation_of(public_key: &[u8]) -> u64 {
    let digest = digest(&SHA256, public_key);
    let first = digest.as_ref().first_chunk().expect("a digest is 32 bytes long");
    u64::from_le_bytes(*first)
}

fn in_context(hello: &[u8]) -> Vec<u8> {
    [CONTEXT, hello].concat()
}
