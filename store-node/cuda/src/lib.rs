//! NVIDIA's driver, opened at run time: the part of `cuda.h` that is used here. Nothing is linked, and a host without
//! the driver gets a sentence, [`DriverError`].
//!
//! Reading path:
//! 1. [`driver`]: the library, a GPU, its memory and streams
//! 2. [`shared`]: memory of a GPU that another process has allocated, and memory of the host that a GPU copies from and to
//! 3. [`kernel`]: code on a GPU, recorded launches, and how long they take
//! 4. [`ask`]: what the driver says of a host's GPUs, for people who want to know
//!
//! The seam below them is `table`: it looks the functions up, by our own declarations (`table_own.rs`) or, with
//! `--cfg kvasir_cudarc`, from cudarc (`table_cudarc.rs`). Decision 62 says why there are two.
//!
//! A table of functions is looked up when the first of them is needed: a driver that lacks some is only of no use to
//! those who call them.

mod ask;
mod driver;
mod kernel;
mod shared;
#[cfg_attr(kvasir_cudarc, path = "table_cudarc.rs")]
#[cfg_attr(not(kvasir_cudarc), path = "table_own.rs")]
mod table;

pub use ask::{Asked, AskedDevice};
pub use driver::{Device, DeviceAddress, Driver, Memory, Stream, symbol};
pub use kernel::{Event, Graph, Kernel, Module};
pub use shared::{IpcHandle, Registered, SharedAllocation};

/// Why a GPU cannot be used. Its text is a sentence for the person who runs the host.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error("cannot open {library}: {install}")]
    Missing {
        library: &'static str,
        install: &'static str,
        #[source]
        source: libloading::Error,
    },
    #[error("{library} has no `{name}`: install a newer version")]
    TooOld { library: &'static str, name: &'static str },
    #[error("`{call}` failed with code {code}: {says}")]
    Failed { call: &'static str, code: i32, says: String },
    #[error("GPU {index} does not exist: this host has {count} GPUs")]
    NoSuchDevice { index: usize, count: usize },
    #[error("no GPU of this host has the UUID {uuid}; check that the process may use the GPU")]
    NoSuchUuid { uuid: String },
}
