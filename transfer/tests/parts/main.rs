//! The parts that are useful on their own (memory, rings, doorbells, descriptors, processes), and what
//! concerns one domain only.

#[path = "../support/certificates.rs"]
mod certificates;
mod crowd;
#[path = "../support/device.rs"]
mod device;
mod doorbell;
mod engine;
mod hostile;
mod lanes;
mod memory;
mod ring;
mod shm_hostile;
mod shm_receiver;
mod sim;
mod tls;
mod verbs;
mod versions;
