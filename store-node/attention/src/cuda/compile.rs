//! NVRTC, opened at run time: from the kernels' source to a cubin for one generation of GPUs.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

use kvasir_cuda::{DriverError, symbol};

use super::CudaError;
use super::variant::{Arch, SOURCE, Variant};

const LIBRARY: &str = "libnvrtc";
const INSTALL: &str = "install CUDA's run-time compiler, such as nvidia-cuda-nvrtc-cu12 from PyPI";
/// Under which names it is looked for, the newest first.
const FILES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

type Program = *mut c_void;

/// The compiler's library. It is never closed.
#[derive(Debug, Clone, Copy)]
pub struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    error: unsafe extern "C" fn(c_int) -> *const c_char,
}

/// What became of a source.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// For [`Module::load`](kvasir_cuda::Module::load).
    pub cubin: Vec<u8>,
    /// What the assembler says of registers, spills and shared memory.
    pub log: String,
}

impl Nvrtc {
    /// Opens the library where the system has it.
    ///
    /// # Errors
    /// [`DriverError::Missing`] says what to install.
    pub fn open() -> Result<Nvrtc, CudaError> {
        static OPEN: OnceLock<Nvrtc> = OnceLock::new();
        if let Some(nvrtc) = OPEN.get() {
            return Ok(*nvrtc);
        }
        let mut opened = Nvrtc::open_file(Path::new(FILES[0]));
        for file in &FILES[1..] {
            if opened.is_ok() {
                break;
            }
            opened = Nvrtc::open_file(Path::new(file));
        }
        opened.inspect(|nvrtc| {
            OPEN.get_or_init(|| *nvrtc);
        })
    }

    /// Opens the library in this file.
    ///
    /// # Errors
    /// [`DriverError::Missing`] and [`DriverError::TooOld`].
    pub fn open_file(path: &Path) -> Result<Nvrtc, CudaError> {
        // SAFETY: NVIDIA's library, by its own name or where the operator says that it is; its
        // constructors do nothing to this process.
        let library = unsafe { libloading::Library::new(path) }.map_err(|source| {
            DriverError::Missing { library: LIBRARY, install: INSTALL, source }
        })?;
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        // SAFETY: the functions of these names in `nvrtc.h`, of these types since CUDA 11.1.
        unsafe {
            Ok(Nvrtc {
                create: symbol(library, LIBRARY, "nvrtcCreateProgram")?,
                compile: symbol(library, LIBRARY, "nvrtcCompileProgram")?,
                destroy: symbol(library, LIBRARY, "nvrtcDestroyProgram")?,
                log_size: symbol(library, LIBRARY, "nvrtcGetProgramLogSize")?,
                log: symbol(library, LIBRARY, "nvrtcGetProgramLog")?,
                cubin_size: symbol(library, LIBRARY, "nvrtcGetCUBINSize")?,
                cubin: symbol(library, LIBRARY, "nvrtcGetCUBIN")?,
                error: symbol(library, LIBRARY, "nvrtcGetErrorString")?,
            })
        }
    }

    /// Compiles a kernel for a generation of GPUs.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's log, which would be a mistake in the source or a
    /// compiler that is too old for it.
    pub fn compile(&self, variant: &Variant, arch: Arch) -> Result<Compiled, CudaError> {
        let mut options = vec![
            format!("--gpu-architecture={}", arch.name()),
            "--std=c++17".into(),
            // Constants and functions of the other variants.
            "--diag-suppress=177".into(),
            "--ptxas-options=-v".into(),
        ];
        options.extend(variant.defines().into_iter().map(|define| format!("-D{define}")));
        let text = |text: &str| CString::new(text).expect("no zero in the source or an option");
        let (source, name) = (text(SOURCE), text("partial.cu"));
        let options: Vec<CString> = options.iter().map(|option| text(option)).collect();
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();

        let mut program: Program = std::ptr::null_mut();
        // SAFETY: two strings that live through the call, no headers, and a place for the handle.
        let code = unsafe {
            let none = std::ptr::null();
            (self.create)(&mut program, source.as_ptr(), name.as_ptr(), 0, none, none)
        };
        self.checked("nvrtcCreateProgram", code)?;
        let program = Owned { nvrtc: self, program };
        // SAFETY: a program that is, and as many strings as are counted, which live through the call.
        let code =
            unsafe { (self.compile)(program.program, options.len() as c_int, options.as_ptr()) };
        // SAFETY: both functions are of this library, and what `log` writes is as long as said.
        let log = unsafe { program.read(self.log_size, self.log) }.unwrap_or_default();
        let log = String::from_utf8_lossy(log.strip_suffix(b"\0").unwrap_or(&log)).into_owned();
        if code != 0 {
            return Err(CudaError::Compile { log });
        }
        // SAFETY: as for the log.
        let cubin = unsafe { program.read(self.cubin_size, self.cubin) }?;
        Ok(Compiled { cubin, log })
    }

    fn checked(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: it takes any number and returns a string that is never freed.
        let says = unsafe { CStr::from_ptr((self.error)(code)) }.to_string_lossy().into_owned();
        Err(DriverError::Failed { call, code, says }.into())
    }
}

/// A program that is destroyed at its end.
struct Owned<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Owned<'_> {
    /// # Safety
    /// `size` tells how many bytes `get` writes.
    unsafe fn read(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, CudaError> {
        let mut bytes = 0;
        // SAFETY: a program that is, and a place for one number.
        self.nvrtc.checked("a size of NVRTC", unsafe { size(self.program, &mut bytes) })?;
        let mut read = vec![0u8; bytes];
        // SAFETY: as much room as the library asked for.
        let code = unsafe { get(self.program, read.as_mut_ptr().cast()) };
        self.nvrtc.checked("a result of NVRTC", code)?;
        Ok(read)
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: a program that is, and is not used again.
        unsafe { (self.nvrtc.destroy)(&mut self.program) };
    }
}
