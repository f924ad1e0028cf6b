//! The shared library, opened at run time. Nothing is linked and nothing is needed to build; a host
//! without libfabric gets one sentence that says what to install.
//!
//! It is never closed again: providers start threads and leave destructors behind, which must find
//! their code. All of this crate lives on references into it.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::bindings::*;
use crate::error::Failure;

/// libfabric's version, of its interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    pub major: u16,
    pub minor: u16,
}

impl Version {
    pub const fn new(major: u16, minor: u16) -> Self {
        Version { major, minor }
    }

    fn from_packed(packed: u32) -> Self {
        Version { major: (packed >> 16) as u16, minor: packed as u16 }
    }

    pub(crate) fn packed(self) -> u32 {
        u32::from(self.major) << 16 | u32::from(self.minor)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The oldest that is taken: what came before lacks fields that are read.
pub const OLDEST: Version = Version::new(1, 14);

/// The interface that is asked for, where the library has it: a library answers `ENOSYS` when asked
/// for more than it is. Newer libraries keep this one.
pub const ASKED: Version = Version::new(1, 20);

/// Where it is looked for, in this order. The installer of EC2's drivers puts its own beside that of
/// the distribution, which has no `efa` on many.
const NAMES: [&str; 3] = [
    "/opt/amazon/efa/lib64/libfabric.so.1",
    "/opt/amazon/efa/lib/libfabric.so.1",
    "libfabric.so.1",
];

/// Why there is no libfabric here. Each is a sentence for an operator.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    #[error(
        "cannot open libfabric.so.1 on this host: install libfabric1 (Debian, Ubuntu), libfabric \
         (Fedora, Amazon Linux) or, on EC2, the EFA installer"
    )]
    Missing(#[source] libloading::Error),
    #[error(
        "this host has libfabric {found}, but {OLDEST} or newer is required: install a newer \
         version"
    )]
    TooOld { found: Version },
    #[error("{path} is not libfabric: it lacks {function}", path = path.display())]
    Incomplete { path: PathBuf, function: &'static str },
}

/// libfabric. A reference to the one in the process: copy it freely.
#[derive(Clone, Copy)]
pub struct Library(&'static Symbols);

pub(crate) struct Symbols {
    path: PathBuf,
    version: Version,
    pub getinfo: fi_getinfo_fn,
    pub freeinfo: fi_freeinfo_fn,
    pub dupinfo: fi_dupinfo_fn,
    pub fabric: fi_fabric_fn,
    strerror: fi_strerror_fn,
}

static OPENED: OnceLock<Library> = OnceLock::new();

impl Library {
    /// Opens libfabric, or answers with the one that is open already. A failure is not remembered: it
    /// is looked for again.
    ///
    /// libfabric and its providers read environment variables of their own (`FI_*`); they are the
    /// operator's, and this crate sets none.
    ///
    /// # Errors
    /// [`Unavailable`].
    pub fn open() -> Result<Self, Unavailable> {
        if let Some(library) = OPENED.get() {
            return Ok(*library);
        }
        let is_there = |name: &&str| !name.starts_with('/') || Path::new(name).exists();
        let mut failed = None;
        for name in NAMES.into_iter().filter(is_there) {
            // SAFETY: a library under libfabric's own name, of the operator's system.
            match unsafe { Self::open_at(Path::new(name)) } {
                Ok(library) => return Ok(*OPENED.get_or_init(|| library)),
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.expect("the last name has no path, and so is always tried"))
    }

    /// Opens the library at `path`, for tests and unusual places. What is opened stays open.
    ///
    /// # Errors
    /// [`Unavailable`].
    ///
    /// # Safety
    /// Opening a library runs code of it: it must be libfabric, or nothing that harms.
    pub unsafe fn open_at(path: &Path) -> Result<Self, Unavailable> {
        // SAFETY: the caller vouches for the library.
        let library = unsafe { libloading::Library::new(path) }.map_err(Unavailable::Missing)?;
        let lacks = |function| Unavailable::Incomplete { path: path.to_owned(), function };
        // SAFETY: all six are the functions of these names in libfabric's headers, whose types are
        // in `bindings`; without a version `dlsym` gives the newest of each, which belong together.
        let symbols = unsafe {
            let version: fi_version_fn =
                *library.get(b"fi_version\0").map_err(|_| lacks("fi_version"))?;
            Symbols {
                path: path.to_owned(),
                version: Version::from_packed(version()),
                getinfo: *library.get(b"fi_getinfo\0").map_err(|_| lacks("fi_getinfo"))?,
                freeinfo: *library.get(b"fi_freeinfo\0").map_err(|_| lacks("fi_freeinfo"))?,
                dupinfo: *library.get(b"fi_dupinfo\0").map_err(|_| lacks("fi_dupinfo"))?,
                fabric: *library.get(b"fi_fabric\0").map_err(|_| lacks("fi_fabric"))?,
                strerror: *library.get(b"fi_strerror\0").map_err(|_| lacks("fi_strerror"))?,
            }
        };
        // From here on it stays open, whatever the answer: it may have started threads.
        Box::leak(Box::new(library));
        if symbols.version < OLDEST {
            return Err(Unavailable::TooOld { found: symbols.version });
        }
        Ok(Library(Box::leak(Box::new(symbols))))
    }

    /// The library's own version.
    pub fn version(self) -> Version {
        self.0.version
    }

    /// The interface that is asked of it: the lesser of its own version and [`ASKED`].
    pub fn interface(self) -> Version {
        self.0.version.min(ASKED)
    }

    /// The name or path that it was opened under.
    pub fn path(self) -> &'static Path {
        &self.0.path
    }

    pub(crate) fn symbols(self) -> &'static Symbols {
        self.0
    }

    /// What a call's negative result means.
    pub(crate) fn failure(self, call: &'static str, result: impl Into<i64>) -> Failure {
        let errno = i32::try_from(result.into().unsigned_abs()).unwrap_or(FI_EIO);
        Failure { call, errno, text: self.text(errno), provider: None }
    }

    fn text(self, errno: c_int) -> String {
        // SAFETY: takes any number, and answers with a text that is never freed (or null).
        let text = unsafe { (self.0.strerror)(errno) };
        if text.is_null() {
            return format!("error {errno}");
        }
        // SAFETY: not null, and a C string as libfabric promises.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library")
            .field("path", &self.0.path)
            .field("version", &self.0.version)
            .finish()
    }
}
