//! What the driver says of a host's GPUs, and whether network cards reach their memory. No context is made.

use std::ffi::c_int;

use crate::DriverError;
use crate::driver::Driver;

/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED` of `cuda.h`.
pub(crate) const RDMA_SUPPORTED: c_int = 116;
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED` of `cuda.h`.
pub(crate) const DMA_BUF_SUPPORTED: c_int = 124;
const DEVICES_MAX: usize = 64;

/// What the driver says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// The newest CUDA that it serves, such as (12, 8).
    pub version: (u32, u32),
    pub devices: Vec<AskedDevice>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AskedDevice {
    pub name: String,
    /// Its memory can be handed to network cards as a DMA buffer.
    pub dma_buf: bool,
    /// Its memory can be reached by network cards through a module such as nvidia_peermem.
    pub peer_memory: bool,
}

impl Asked {
    /// Opens the driver and asks it.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn ask() -> Result<Asked, DriverError> {
        Asked::of(Driver::open()?)
    }

    /// Asks a driver that is open.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn of(driver: Driver) -> Result<Asked, DriverError> {
        let version = driver.version()?;
        let device = |index| {
            let number = driver.number(index)?;
            // An attribute that the driver does not know is one that it does not have.
            let has = |which| driver.attribute(which, number).is_ok_and(|value| value != 0);
            Ok(AskedDevice {
                name: driver.name(number)?,
                dma_buf: has(DMA_BUF_SUPPORTED),
                peer_memory: has(RDMA_SUPPORTED),
            })
        };
        let count = driver.devices()?.min(DEVICES_MAX);
        let devices: Result<Vec<_>, DriverError> = (0..count).map(device).collect();
        Ok(Asked { version: (version / 1000, version % 1000 / 10), devices: devices? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a driver it answers; without one there is a sentence.
    #[test]
    fn a_host_has_a_driver_or_a_sentence_that_says_what_is_missing() {
        match Asked::ask() {
            Ok(driver) => assert!(driver.version.0 >= 10, "{driver:?}"),
            Err(error) => {
                let said = error.to_string();
                assert!(said.contains("driver") && said.contains(' '), "{said}");
            }
        }
    }
}
