//! Puts, gets and removes objects in the store node of `docs/integrate/objects.md`, which shows this program.

#![allow(clippy::print_stdout, reason = "a program that reports on its output")]

use std::time::Duration;

use kvasir_client::{Class, Client, OpenOptions, PutOptions, Tier};

fn main() -> Result<(), kvasir_client::Error> {
    let client = Client::open(&OpenOptions {
        tenant: "me".into(),
        namespace: "drafts".into(),
        object_bytes_max: 128 << 10,
        ..OpenOptions::new("/tmp/kvasir-objects")
    })?;

    // Put two objects. The client copies the bytes once, into slots of the node.
    let (first, second) = (client.key(b"first"), client.key(b"second"));
    let outcomes =
        client.put(&[(first, &b"some bytes"[..]), (second, b"more")], &PutOptions::default())?;
    println!("put: {outcomes:?}");

    // Get reads in place: the object is pinned until it is dropped.
    for object in client.get(&[first, second])?.into_iter().flatten() {
        println!("got {} bytes at offset {}", object.len(), object.offset());
    }

    // Write in place, without a copy.
    let third = client.key(b"third");
    let mut reservation = client.reserve(&[third], Duration::from_secs(10))?;
    if !reservation.is_there(0) {
        reservation.bytes_mut(0, 4)?.copy_from_slice(b"1234");
    }
    reservation.commit(Class::Context { ttl: Duration::from_secs(3600) })?;

    assert_eq!(client.find(&[third])?, [Some(Tier::Dram)]);
    println!("removed {}", client.remove(&[first, second, third])?);
    Ok(())
}
