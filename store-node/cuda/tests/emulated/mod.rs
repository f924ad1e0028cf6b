//! A driver whose GPU is files of the host, made of `driver.cpp`.

#![allow(dead_code)] // each test uses a part of it

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use kvasir_cuda::Driver;

/// The driver, and what it counts. A library of its own for each test.
#[derive(Debug)]
pub(crate) struct Emulated {
    pub driver: Driver,
    library: libloading::Library,
    file: PathBuf,
}

impl Emulated {
    /// Nothing, and a sentence, where there is no C++ compiler.
    pub(crate) fn build() -> Option<Emulated> {
        static BUILT: AtomicU32 = AtomicU32::new(0);
        let source = Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .map(|folder| folder.join("store-node/cuda/tests/emulated/driver.cpp"))
            .find(|file| file.exists())
            .expect("it lies beside this file");
        let number = BUILT.fetch_add(1, Ordering::Relaxed);
        let name = format!("emulated-gpu-{}-{number}.so", std::process::id());
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let mut command = Command::new("c++");
        command.args(["-O1", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror"]);
        let output = match command.arg(source).arg("-o").arg(&file).output() {
            Ok(output) => output,
            Err(error) => {
                writeln!(std::io::stderr(), "skipped: c++ is needed to emulate a GPU: {error}")
                    .ok();
                return None;
            }
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let driver = Driver::open_file(&file).expect("what was compiled");
        // SAFETY: it is open already, and its constructors have run.
        let library = unsafe { libloading::Library::new(&file) }.expect("what was compiled");
        Some(Emulated { driver, library, file })
    }

    /// Where the library is.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    /// How many things are there that nobody destroyed.
    pub(crate) fn live(&self) -> i64 {
        // SAFETY: a function of `driver.cpp` of this type.
        unsafe {
            let live = self.library.get::<unsafe extern "C" fn() -> i64>(b"live_handles");
            live.expect("a function")()
        }
    }

    pub(crate) fn registered_bytes(&self) -> usize {
        // SAFETY: as above.
        unsafe {
            let bytes = self.library.get::<unsafe extern "C" fn() -> usize>(b"registered_bytes");
            bytes.expect("a function")()
        }
    }

    /// Copies that are waited for from now on fail, or do not.
    pub(crate) fn set_copies_fail(&self, fail: bool) {
        // SAFETY: as above.
        unsafe {
            let set = self.library.get::<unsafe extern "C" fn(i32)>(b"set_copies_fail");
            set.expect("a function")(fail.into());
        }
    }

    /// Copies that are waited for go on when this is taken back, and not before.
    pub(crate) fn set_copies_held(&self, hold: bool) {
        // SAFETY: as above.
        unsafe {
            let set = self.library.get::<unsafe extern "C" fn(i32)>(b"set_copies_held");
            set.expect("a function")(hold.into());
        }
    }

    /// Whether somebody waits for copies because of that.
    pub(crate) fn holds_copies(&self) -> bool {
        // SAFETY: as above.
        unsafe {
            let held = self.library.get::<unsafe extern "C" fn() -> i32>(b"copies_held_now");
            held.expect("a function")() > 0
        }
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        // A thread that waits for ever would keep the test from ending.
        self.set_copies_held(false);
        let _ = std::fs::remove_file(&self.file);
    }
}
