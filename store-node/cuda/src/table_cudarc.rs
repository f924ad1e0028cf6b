//! The driver's functions from cudarc: its `sys` layer opens the library, looks up every function and declares it.
//! Built with `--cfg kvasir_cudarc` in place of `table_own.rs`.
//!
//! cudarc's table is made of the file that [`DriverLibrary::of`] names. `cudarc::driver::sys::lib` is never called: it
//! searches fixed names, and panics if it finds none. The table keeps an error for each function that the library
//! lacks, and that error becomes [`DriverError::TooOld`] when the function is first needed.
//!
//! cudarc declares each result as a Rust enum. A driver that is newer than the enum may return another number, which
//! would be undefined behaviour. So [`retyped`] gives every function the integer types that this crate declares. It
//! compiles only if both declarations have the same layout.

use std::fmt;
use std::path::Path;

use cudarc::driver::sys;

use crate::DriverError;
use crate::driver::{INSTALL, LIBRARY};

/// The driver's library. It is never closed, because the driver has threads.
pub(crate) struct DriverLibrary {
    pub(crate) table: sys::Lib,
    _library: libloading::Library,
}

impl fmt::Debug for DriverLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverLibrary").finish_non_exhaustive()
    }
}

impl DriverLibrary {
    /// `library` is open while cudarc opens it a second time, so that both get the same one, even if the file is
    /// replaced in between.
    pub(crate) fn of(
        library: libloading::Library,
        path: &Path,
    ) -> Result<&'static DriverLibrary, DriverError> {
        // SAFETY: `library` has this name and is open, so this opening runs no constructor.
        let table = unsafe { sys::Lib::new(path) }.map_err(|_| DriverError::Missing {
            library: LIBRARY,
            install: INSTALL,
            // cudarc's error is of an older `libloading`, and cannot be carried here.
            source: libloading::Error::DlOpenUnknown,
        })?;
        Ok(Box::leak(Box::new(DriverLibrary { table, _library: library })))
    }
}

/// A function of a [`DriverLibrary`], as the type that the caller declares.
macro_rules! function {
    ($library:expr, $name:ident) => {
        $crate::table::retyped(&$library.table.$name, stringify!($name))
    };
}
pub(crate) use function;

/// # Safety
/// Both are types of the same function of `cuda.h`. The compiler checks the layouts alone.
pub(crate) unsafe fn retyped<Theirs: Declared, Ours: Declared, E>(
    found: &Result<Theirs, E>,
    name: &'static str,
) -> Result<Ours, DriverError> {
    const { assert!(is_same(Theirs::LAYOUTS, Ours::LAYOUTS), "cudarc declares it otherwise") };
    let function = found.as_ref().map_err(|_| DriverError::TooOld { library: LIBRARY, name })?;
    // SAFETY: by the caller's promise both are types of one C function, so they have one calling convention. The layouts
    // of the arguments and of the result were compared above.
    Ok(unsafe { std::mem::transmute_copy(function) })
}

/// A pointer to a C function: size and alignment of its result and of each argument.
pub(crate) trait Declared: Copy {
    const LAYOUTS: &'static [(usize, usize)];
}

macro_rules! declared {
    ($($argument:ident)*) => {
        impl<R, $($argument),*> Declared for unsafe extern "C" fn($($argument),*) -> R {
            const LAYOUTS: &'static [(usize, usize)] = &[
                (size_of::<R>(), align_of::<R>()),
                $((size_of::<$argument>(), align_of::<$argument>())),*
            ];
        }
    };
}
declared! { A }
declared! { A B }
declared! { A B C }
declared! { A B C D }

const fn is_same(one: &[(usize, usize)], other: &[(usize, usize)]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() {
        if one[at].0 != other[at].0 || one[at].1 != other[at].1 {
            return false;
        }
        at += 1;
    }
    one.len() == other.len()
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use sys::{CUdevice_attribute as Attribute, CUlaunchAttribute, CUlaunchConfig};

    use super::*;
    use crate::kernel::{self, LaunchAttribute, LaunchConfig};
    use crate::{ask, driver, shared};

    #[test]
    fn numbers_are_those_of_cudarc() {
        use Attribute::*;
        let attributes = [
            (driver::ATTRIBUTE_MULTIPROCESSORS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            (driver::ATTRIBUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            (driver::ATTRIBUTE_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            (ask::RDMA_SUPPORTED, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
            (ask::DMA_BUF_SUPPORTED, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
        ];
        for (ours, theirs) in attributes {
            assert_eq!(ours, theirs as i32, "{theirs:?}");
        }
        let flags = [
            (driver::STREAM_NON_BLOCKING, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32),
            (
                shared::LAZY_PEER_ACCESS,
                sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32,
            ),
            (shared::REGISTER_PORTABLE, sys::CU_MEMHOSTREGISTER_PORTABLE),
        ];
        for (ours, theirs) in flags {
            assert_eq!(ours, theirs);
        }
        let function = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        assert_eq!(kernel::FUNCTION_SHARED_BYTES_MAX, function as i32);
        let capture = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        assert_eq!(kernel::CAPTURE_THREAD_LOCAL, capture as i32);
        use sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as SERIAL;
        assert_eq!(kernel::LAUNCH_OVERLAPS, SERIAL as i32);
    }

    #[test]
    fn structures_are_those_of_cudarc() {
        assert_eq!(size_of::<LaunchAttribute>(), size_of::<CUlaunchAttribute>());
        assert_eq!(size_of::<LaunchConfig>(), size_of::<CUlaunchConfig>());
        let offsets = [
            (offset_of!(LaunchAttribute, value), offset_of!(CUlaunchAttribute, value)),
            (offset_of!(LaunchConfig, grid), offset_of!(CUlaunchConfig, gridDimX)),
            (offset_of!(LaunchConfig, block), offset_of!(CUlaunchConfig, blockDimX)),
            (offset_of!(LaunchConfig, shared_bytes), offset_of!(CUlaunchConfig, sharedMemBytes)),
            (offset_of!(LaunchConfig, stream), offset_of!(CUlaunchConfig, hStream)),
            (offset_of!(LaunchConfig, attributes), offset_of!(CUlaunchConfig, attrs)),
            (offset_of!(LaunchConfig, attribute_count), offset_of!(CUlaunchConfig, numAttrs)),
        ];
        for (ours, theirs) in offsets {
            assert_eq!(ours, theirs);
        }
    }

    #[test]
    fn declarations_that_differ_are_told_apart() {
        assert!(is_same(&[(4, 4), (8, 8)], &[(4, 4), (8, 8)]));
        assert!(!is_same(&[(4, 4), (8, 8)], &[(4, 4), (4, 4)]));
        assert!(!is_same(&[(4, 4), (8, 8)], &[(4, 4)]));
    }
}
