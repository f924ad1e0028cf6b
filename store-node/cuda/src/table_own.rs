//! The driver's functions by our own declarations: each is looked up in the library by its name. Built unless
//! `--cfg kvasir_cudarc` is set.

use std::path::Path;

use crate::DriverError;

/// The driver's library. It is never closed, because the driver has threads.
#[derive(Debug)]
pub(crate) struct DriverLibrary(pub(crate) libloading::Library);

impl DriverLibrary {
    pub(crate) fn of(
        library: libloading::Library,
        _path: &Path,
    ) -> Result<&'static DriverLibrary, DriverError> {
        Ok(Box::leak(Box::new(DriverLibrary(library))))
    }
}

/// A function of a [`DriverLibrary`], as the type that the caller declares.
macro_rules! function {
    ($library:expr, $name:ident) => {
        $crate::driver::symbol(&$library.0, $crate::driver::LIBRARY, stringify!($name))
    };
}
pub(crate) use function;
