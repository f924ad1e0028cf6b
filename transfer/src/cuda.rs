//! Whether NVIDIA's driver is here, what it drives, and whether network cards reach the memory of that. The
//! driver's library is opened at run time: nothing is linked, and a host without it gets a sentence. For
//! people who ask what a host offers; no domain needs it.

use std::ffi::{c_char, c_int, c_uint};

const FILE: &str = "libcuda.so.1";
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED` of `cuda.h`.
const RDMA_SUPPORTED: c_int = 116;
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED` of `cuda.h`.
const DMA_BUF_SUPPORTED: c_int = 124;
const DEVICES_MAX: c_int = 64;
const NAME_BYTES: usize = 128;

/// Why this process cannot use GPUs. Its text is a sentence for the person who runs the host.
#[derive(Debug, thiserror::Error)]
pub enum CudaUnavailable {
    #[error("{FILE} cannot be opened: install NVIDIA's driver where there is a GPU")]
    Missing(#[source] libloading::Error),
    #[error("{FILE} has no `{0}`: install a newer driver of NVIDIA's")]
    TooOld(&'static str),
    #[error("the driver answers `{call}` with error {code}; is the kernel's module loaded?")]
    Failed { call: &'static str, code: c_int },
}

/// What the driver says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaDriver {
    /// The newest CUDA that it serves, such as (12, 8).
    pub version: (u32, u32),
    pub devices: Vec<CudaDevice>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaDevice {
    pub name: String,
    /// Its memory can be handed to network cards as a DMA buffer.
    pub dma_buf: bool,
    /// Its memory can be reached by network cards through a module such as nvidia_peermem.
    pub peer_memory: bool,
}

type Init = unsafe extern "C" fn(c_uint) -> c_int;
type Number = unsafe extern "C" fn(*mut c_int) -> c_int;
type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
type Name = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
type Attribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;

fn checked(call: &'static str, code: c_int) -> Result<(), CudaUnavailable> {
    if code == 0 { Ok(()) } else { Err(CudaUnavailable::Failed { call, code }) }
}

impl CudaDriver {
    /// Opens the driver and asks it. No context is made on any device.
    ///
    /// # Errors
    /// [`CudaUnavailable`].
    pub fn ask() -> Result<CudaDriver, CudaUnavailable> {
        // SAFETY: the driver's library under its own name, of the operator's system. It is never closed:
        // it may have started threads.
        let library =
            unsafe { libloading::Library::new(FILE) }.map_err(CudaUnavailable::Missing)?;
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        let lacks = |name| move |_| CudaUnavailable::TooOld(name);
        // SAFETY: the functions of these names in `cuda.h`, of these types since CUDA 2.0.
        let (init, version, count, get, name, attribute) = unsafe {
            (
                library.get::<Init>(b"cuInit\0").map_err(lacks("cuInit"))?,
                library
                    .get::<Number>(b"cuDriverGetVersion\0")
                    .map_err(lacks("cuDriverGetVersion"))?,
                library.get::<Number>(b"cuDeviceGetCount\0").map_err(lacks("cuDeviceGetCount"))?,
                library.get::<Get>(b"cuDeviceGet\0").map_err(lacks("cuDeviceGet"))?,
                library.get::<Name>(b"cuDeviceGetName\0").map_err(lacks("cuDeviceGetName"))?,
                library
                    .get::<Attribute>(b"cuDeviceGetAttribute\0")
                    .map_err(lacks("cuDeviceGetAttribute"))?,
            )
        };
        let number = |call, of: &Number| {
            let mut number = 0;
            // SAFETY: it writes one number, which lives through the call.
            checked(call, unsafe { of(&mut number) })?;
            Ok::<c_int, CudaUnavailable>(number)
        };
        // SAFETY: it takes flags, of which there are none.
        checked("cuInit", unsafe { init(0) })?;
        let version = number("cuDriverGetVersion", &version)?.unsigned_abs();
        let count = number("cuDeviceGetCount", &count)?.clamp(0, DEVICES_MAX);
        let device = |index: c_int| {
            let mut device = 0;
            // SAFETY: it writes one number, which lives through the call.
            checked("cuDeviceGet", unsafe { get(&mut device, index) })?;
            let mut text = [0u8; NAME_BYTES];
            // SAFETY: it writes at most as many bytes as it is told, its zero among them.
            let named = unsafe { name(text.as_mut_ptr().cast(), NAME_BYTES as c_int, device) };
            checked("cuDeviceGetName", named)?;
            // An attribute that the driver does not know is one that it does not have.
            let has = |which| {
                let mut value = 0;
                // SAFETY: it writes one number, which lives through the call.
                let code = unsafe { attribute(&mut value, which, device) };
                code == 0 && value != 0
            };
            let bytes = text.split(|byte| *byte == 0).next().unwrap_or_default();
            Ok(CudaDevice {
                name: String::from_utf8_lossy(bytes).into_owned(),
                dma_buf: has(DMA_BUF_SUPPORTED),
                peer_memory: has(RDMA_SUPPORTED),
            })
        };
        let devices: Result<Vec<_>, CudaUnavailable> = (0..count).map(device).collect();
        Ok(CudaDriver { version: (version / 1000, version % 1000 / 10), devices: devices? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a driver it answers; without one there is a sentence.
    #[test]
    fn a_host_has_a_driver_or_a_sentence_that_says_what_is_missing() {
        match CudaDriver::ask() {
            Ok(driver) => assert!(driver.version.0 >= 10, "{driver:?}"),
            Err(error) => {
                let said = error.to_string();
                assert!(said.contains("driver") && said.contains(' '), "{said}");
            }
        }
    }
}
