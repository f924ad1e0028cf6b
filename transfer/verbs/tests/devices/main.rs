//! The layer on a device. Where there is none each test says so and ends; `tests/verbs-vm/run` runs them
//! all on devices in software, in a virtual machine.
//!
//! `KVASIR_VERBS_LOOPBACK` names the device to use, else the first with an active port is.
//! `KVASIR_VERBS_WIRE` names two that are connected, for example `rxe1,rxe2`; what needs them is left out
//! otherwise. `KVASIR_VERBS_WIRE_IS_SLOW=1` says that packets between them take a while.

mod cut_off;
mod datagrams;
mod errors;
mod order;
mod queues;
mod regions;
mod support;
mod writes;
