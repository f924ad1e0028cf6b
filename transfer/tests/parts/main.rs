//! The parts that are useful on their own (memory, rings, doorbells, descriptors, processes), and what
//! concerns one domain only.

mod cards;
#[path = "../support/certificates.rs"]
mod certificates;
mod crowd;
#[path = "../support/device.rs"]
mod device;
mod doorbell;
mod driven;
mod efa;
mod engine;
mod hostile;
mod lanes;
mod memory;
#[path = "../support/provider.rs"]
mod provider;
mod ring;
mod shm_hostile;
mod shm_receiver;
mod sim;
mod tls;
mod verbs;
mod verbs_datagrams;
mod verbs_wire;
mod versions;
