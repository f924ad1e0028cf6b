//! Memory that processes share: a memfd and its mapping. Sealed against resizing, so that no peer can
//! take pages away under a mapping. It hands out copies, atomics and (unsafe) slices; who may write
//! which range when is the business of the layers above. What comes from a socket is placed by the kernel, by
//! its address: no slice says that nobody else writes there.

use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kvasir_checksum::{Checksum, Stores};
use kvasir_mutation::{Mutation, mutated};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Whether pages are made present when the memory is created. First touch costs about 0.5 s per GB,
/// so memory on a hot path is pre-faulted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefault {
    Yes,
    No,
}

/// What memory lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// Of the host's usual size; or larger ones where it makes them by itself, which few do for a memfd.
    Ordinary,
    /// Pages of [`HUGE_PAGE_BYTES`] that the host has reserved (`vm.nr_hugepages`).
    Huge,
}

/// The size of reserved pages that are used.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// What a file system of such pages is known by; see statfs(2).
const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Pages::Ordinary => "ordinary pages",
            Pages::Huge => "reserved pages of 2 MiB",
        })
    }
}

/// How a descriptor that came from elsewhere is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

/// Why memory could not be made or taken over.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("shared memory must have at least one byte")]
    Empty,
    #[error("the descriptor has {actual} bytes, but {wanted} were announced")]
    Size { actual: u64, wanted: u64 },
    #[error("the descriptor is not sealed against shrinking")]
    NotSealed,
    #[error("`{call}` of shared memory failed")]
    System {
        call: &'static str,
        #[source]
        source: rustix::io::Errno,
    },
}

/// A range that does not lie in the memory, is misaligned, or would write memory mapped read-only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("offset {offset} with {bytes} bytes does not fit the memory of {len} bytes")]
pub struct RangeError {
    pub offset: usize,
    pub bytes: usize,
    pub len: usize,
}

/// A range that may be written, here and by others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WritableRange<'a> {
    memory: &'a SharedMemory,
    offset: usize,
    bytes: usize,
}

impl WritableRange<'_> {
    /// Reads from a descriptor into the range and, once that is full, into `behind`. Returns how many bytes came.
    pub(crate) fn read(self, fd: BorrowedFd<'_>, behind: &mut [u8]) -> rustix::io::Result<usize> {
        let at = self.memory.base.wrapping_add(self.offset);
        let parts = [
            libc::iovec { iov_base: at.cast(), iov_len: self.bytes },
            libc::iovec { iov_base: behind.as_mut_ptr().cast(), iov_len: behind.len() },
        ];
        // SAFETY: the first part was checked to lie in the mapping and to be writable, and the mapping is
        // borrowed; the second one is borrowed exclusively. The kernel writes to both by their addresses.
        let bytes = unsafe { libc::readv(fd.as_raw_fd(), parts.as_ptr(), 2) };
        usize::try_from(bytes).map_err(|_| {
            let error = std::io::Error::last_os_error();
            rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO)
        })
    }

    /// Copies as much as there is room for to its beginning. Returns how many bytes those are.
    pub(crate) fn fill(self, source: &[u8]) -> usize {
        let bytes = source.len().min(self.bytes);
        let copied = self.memory.copy_from(self.offset, &source[..bytes]);
        debug_assert!(copied.is_ok(), "the range was checked");
        bytes
    }
}

/// A mapped memfd. Unmapped when dropped; the pages live as long as any process maps them.
#[derive(Debug)]
pub struct SharedMemory {
    fd: OwnedFd,
    base: *mut u8,
    len: usize,
    access: Access,
}

// SAFETY: the mapping is process-wide and lives until drop; every access through `&self` is a raw
// copy, an atomic, or an unsafe slice whose caller answers for it.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

fn system(call: &'static str) -> impl Fn(rustix::io::Errno) -> MemoryError {
    move |source| MemoryError::System { call, source }
}

/// While pages are made present, whoever maps or unmaps anything in this process waits. So it is done in
/// pieces that take less than a millisecond.
const POPULATE_AT_ONCE: usize = 4 << 20;

impl SharedMemory {
    /// Makes zeroed memory. `name` shows in `/proc/PID/maps`.
    ///
    /// # Errors
    /// [`MemoryError`] when `bytes` is 0 or the system refuses.
    pub fn create(name: &str, bytes: usize, prefault: Prefault) -> Result<Self, MemoryError> {
        let memory = Self::create_sealed(name, bytes, MemfdFlags::empty(), SealFlags::empty())?;
        // Large pages are a matter of speed only: most hosts give none to a memfd.
        let _ = memory.advise(Advice::LinuxHugepage);
        if prefault == Prefault::Yes {
            memory.advise(Advice::LinuxPopulateWrite).map_err(system("prefault"))?;
        }
        Ok(memory)
    }

    /// Makes zeroed and pre-faulted memory for what is large: in reserved pages where the host has as many free and
    /// `bytes` is a multiple of their size, otherwise in ordinary ones. [`SharedMemory::pages`] says which.
    ///
    /// # Errors
    /// As [`SharedMemory::create`].
    pub fn create_large(name: &str, bytes: usize) -> Result<Self, MemoryError> {
        match Self::create_huge(name, bytes) {
            Some(memory) => Ok(memory),
            None => Self::create(name, bytes, Prefault::Yes),
        }
    }

    /// All of it or nothing: the kernel sets pages aside when it is mapped, or refuses to.
    fn create_huge(name: &str, bytes: usize) -> Option<Self> {
        if !bytes.is_multiple_of(HUGE_PAGE_BYTES) {
            return None;
        }
        let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let memory = Self::create_sealed(name, bytes, flags, SealFlags::empty()).ok()?;
        // A limit of the cgroup may be met only now. Here that is an error; at a first touch it would be a signal
        // that ends the process.
        memory.make_present().ok()?;
        Some(memory)
    }

    /// Makes memory that only this mapping can write: whoever gets the descriptor can map it for
    /// reading.
    ///
    /// # Errors
    /// As [`SharedMemory::create`].
    pub fn create_for_readers(name: &str, bytes: usize) -> Result<Self, MemoryError> {
        Self::create_sealed(name, bytes, MemfdFlags::empty(), SealFlags::FUTURE_WRITE)
    }

    fn create_sealed(
        name: &str,
        bytes: usize,
        kind: MemfdFlags,
        more: SealFlags,
    ) -> Result<Self, MemoryError> {
        if bytes == 0 {
            return Err(MemoryError::Empty);
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | kind;
        let fd = rustix::fs::memfd_create(name, flags).map_err(system("memfd_create"))?;
        rustix::fs::ftruncate(&fd, bytes as u64).map_err(system("ftruncate"))?;
        // Mapped first: a seal against future writing only spares mappings that exist.
        let memory = Self::map(fd, bytes, Access::ReadWrite)?;
        let is_unsealed = mutated(Mutation::MemoryNotSealed);
        let shrink = if is_unsealed { SealFlags::empty() } else { SealFlags::SHRINK };
        let seals = shrink | SealFlags::GROW | SealFlags::SEAL | more;
        rustix::fs::fcntl_add_seals(&memory.fd, seals).map_err(system("seal"))?;
        Ok(memory)
    }

    /// Maps memory that another process made. The descriptor must hold exactly `bytes` and be sealed
    /// against shrinking; otherwise its owner could crash us by truncating it.
    ///
    /// # Errors
    /// [`MemoryError`] when it does not, or the system refuses.
    pub fn from_fd(fd: OwnedFd, bytes: usize, access: Access) -> Result<Self, MemoryError> {
        if bytes == 0 {
            return Err(MemoryError::Empty);
        }
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(system("get seals"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(MemoryError::NotSealed);
        }
        let actual = rustix::fs::fstat(&fd).map_err(system("fstat"))?.st_size as u64;
        if actual != bytes as u64 {
            return Err(MemoryError::Size { actual, wanted: bytes as u64 });
        }
        let memory = Self::map(fd, bytes, access)?;
        if memory.pages() == Pages::Huge {
            // Where its owner has left pages out there may be none for them: an error here, a signal at a first touch.
            memory.make_present().map_err(system("populate"))?;
        }
        Ok(memory)
    }

    /// What the memory lies in, whoever has made it.
    pub fn pages(&self) -> Pages {
        match rustix::fs::fstatfs(&self.fd) {
            // Its width differs between platforms; the number fits all of them.
            Ok(stat) if stat.f_type as u32 == HUGETLBFS_MAGIC => Pages::Huge,
            _ => Pages::Ordinary,
        }
    }

    fn map(fd: OwnedFd, len: usize, access: Access) -> Result<Self, MemoryError> {
        let protection = match access {
            Access::ReadOnly => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: the kernel chooses a fresh address range, so no existing memory is touched.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, &fd, 0)
        }
        .map_err(system("mmap"))?;
        Ok(SharedMemory { fd, base: base.cast(), len, access })
    }

    fn advise(&self, advice: Advice) -> rustix::io::Result<()> {
        self.advise_range(advice, 0, self.len)
    }

    fn advise_range(&self, advice: Advice, from: usize, bytes: usize) -> rustix::io::Result<()> {
        assert!(from + bytes <= self.len, "beyond the mapping");
        let at = self.base.wrapping_add(from);
        // SAFETY: the range lies in our mapping, and no advice that is given changes its contents.
        unsafe { rustix::mm::madvise(at.cast::<c_void>(), bytes, advice) }
    }

    /// Makes every page present in this process's page table, which otherwise costs a fault per page
    /// at first touch. For memory whose pages exist already (another process pre-faulted them).
    pub fn populate(&self) {
        // A matter of speed only.
        let _ = self.make_present();
    }

    fn make_present(&self) -> rustix::io::Result<()> {
        let advice = match self.access {
            Access::ReadOnly => Advice::LinuxPopulateRead,
            Access::ReadWrite => Advice::LinuxPopulateWrite,
        };
        for from in (0..self.len).step_by(POPULATE_AT_ONCE) {
            self.advise_range(advice, from, POPULATE_AT_ONCE.min(self.len - from))?;
        }
        Ok(())
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    #[allow(clippy::len_without_is_empty)] // it is never empty
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn access(&self) -> Access {
        self.access
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    /// # Errors
    /// [`RangeError`] when the range does not lie inside.
    pub fn check(&self, offset: usize, bytes: usize) -> Result<(), RangeError> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(RangeError { offset, bytes, len: self.len }),
        }
    }

    fn check_writable(&self, offset: usize, bytes: usize) -> Result<(), RangeError> {
        match self.access {
            Access::ReadWrite => self.check(offset, bytes),
            Access::ReadOnly => Err(RangeError { offset, bytes, len: 0 }),
        }
    }

    /// Copies `source` into the memory at `offset`.
    ///
    /// # Errors
    /// [`RangeError`] when it does not fit or the memory is mapped read-only.
    pub fn copy_from(&self, offset: usize, source: &[u8]) -> Result<(), RangeError> {
        self.check_writable(offset, source.len())?;
        // SAFETY: checked above; `source` is an ordinary slice, which cannot overlap memory that is
        // only handed out as unsafe slices.
        unsafe {
            std::ptr::copy_nonoverlapping(source.as_ptr(), self.base.add(offset), source.len());
        }
        Ok(())
    }

    /// Copies `source` into the memory at `offset`, past the caches, and adds it to a checksum in the same pass.
    ///
    /// # Errors
    /// [`RangeError`] when it does not fit or the memory is mapped read-only.
    pub fn copy_from_summed(
        &self,
        offset: usize,
        source: &[u8],
        sum: &mut Checksum,
    ) -> Result<(), RangeError> {
        self.check_writable(offset, source.len())?;
        // SAFETY: checked above; `source` is an ordinary slice, which cannot overlap memory that is
        // only handed out as unsafe slices.
        unsafe {
            let target = self.base.add(offset);
            sum.add_and_copy(source.as_ptr(), target, source.len(), Stores::Streaming);
        }
        Ok(())
    }

    /// Copies memory from `offset` into `target`, and adds it to a checksum in the same pass: what was copied is
    /// what was added, also when somebody writes there.
    ///
    /// # Errors
    /// [`RangeError`] when the range does not lie inside.
    pub fn copy_to_summed(
        &self,
        offset: usize,
        target: &mut [u8],
        sum: &mut Checksum,
    ) -> Result<(), RangeError> {
        self.check(offset, target.len())?;
        // SAFETY: checked above; `target` is an exclusive ordinary slice.
        unsafe {
            let source = self.base.add(offset);
            sum.add_and_copy(source, target.as_mut_ptr(), target.len(), Stores::Cached);
        }
        Ok(())
    }

    /// Adds what lies in a range to a checksum. Somebody may write there: then it is of neither what was there nor
    /// what is, and nothing else happens.
    ///
    /// # Errors
    /// [`RangeError`] when it does not lie inside.
    pub fn add_to(
        &self,
        offset: usize,
        bytes: usize,
        sum: &mut Checksum,
    ) -> Result<(), RangeError> {
        self.check(offset, bytes)?;
        // SAFETY: checked above.
        unsafe { sum.add_at(self.base.add(offset), bytes) };
        Ok(())
    }

    /// Copies memory from `offset` into `target`.
    ///
    /// # Errors
    /// [`RangeError`] when the range does not lie inside.
    pub fn copy_to(&self, offset: usize, target: &mut [u8]) -> Result<(), RangeError> {
        self.check(offset, target.len())?;
        // SAFETY: checked above; `target` is an exclusive ordinary slice.
        unsafe {
            std::ptr::copy_nonoverlapping(self.base.add(offset), target.as_mut_ptr(), target.len());
        }
        Ok(())
    }

    /// A range that bytes shall be placed in.
    ///
    /// # Errors
    /// [`RangeError`] when it does not lie inside or the memory is mapped read-only.
    pub(crate) fn writable(
        &self,
        offset: usize,
        bytes: usize,
    ) -> Result<WritableRange<'_>, RangeError> {
        self.check_writable(offset, bytes)?;
        Ok(WritableRange { memory: self, offset, bytes })
    }

    /// Copies between two memories (or within one, when the ranges do not overlap).
    ///
    /// # Errors
    /// [`RangeError`] when either range does not lie inside, or the target is mapped read-only.
    pub fn copy_between(
        &self,
        offset: usize,
        target: &SharedMemory,
        target_offset: usize,
        bytes: usize,
    ) -> Result<(), RangeError> {
        self.check(offset, bytes)?;
        target.check_writable(target_offset, bytes)?;
        // SAFETY: both checked above; `copy` allows that two mappings show the same pages.
        unsafe {
            std::ptr::copy(self.base.add(offset), target.base.add(target_offset), bytes);
        }
        Ok(())
    }

    /// The bytes of a range.
    ///
    /// # Errors
    /// [`RangeError`] when it does not lie inside.
    ///
    /// # Safety
    /// Nobody, in any process, may write the range while the slice lives.
    pub unsafe fn slice(&self, offset: usize, bytes: usize) -> Result<&[u8], RangeError> {
        self.check(offset, bytes)?;
        // SAFETY: in bounds; the caller promises that nobody writes.
        Ok(unsafe { std::slice::from_raw_parts(self.base.add(offset), bytes) })
    }

    /// The bytes of a range, to be written.
    ///
    /// # Errors
    /// [`RangeError`] when it does not lie inside or the memory is mapped read-only.
    ///
    /// # Safety
    /// Nobody else, in any process, may read or write the range while the slice lives.
    #[allow(clippy::mut_from_ref)] // shared memory: exclusivity is the caller's promise
    pub unsafe fn slice_mut(&self, offset: usize, bytes: usize) -> Result<&mut [u8], RangeError> {
        self.check_writable(offset, bytes)?;
        // SAFETY: in bounds and writable; the caller promises exclusivity.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.base.add(offset), bytes) })
    }

    /// A 64-bit atomic at an 8-byte aligned offset. Memory mapped read-only gives atomics that may
    /// only be loaded: a store faults.
    ///
    /// # Errors
    /// [`RangeError`] when it does not lie inside or is misaligned.
    pub fn atomic_u64(&self, offset: usize) -> Result<&AtomicU64, RangeError> {
        self.check(offset, 8)?;
        if !offset.is_multiple_of(8) {
            return Err(RangeError { offset, bytes: 8, len: self.len });
        }
        // SAFETY: in bounds, aligned (the mapping is page-aligned), and valid for any bit pattern.
        Ok(unsafe { AtomicU64::from_ptr(self.base.add(offset).cast()) })
    }

    /// Stores a word for whoever polls it here or in another process: he who sees it sees what was written
    /// before it, too.
    ///
    /// # Errors
    /// [`RangeError`] when it does not lie inside, is misaligned, or the memory is mapped read-only.
    pub fn store_word(&self, offset: usize, value: u64) -> Result<(), RangeError> {
        self.check_writable(offset, 8)?;
        self.atomic_u64(offset)?.store(value.to_le(), Ordering::Release);
        Ok(())
    }

    /// A 32-bit atomic at a 4-byte aligned offset; see [`SharedMemory::atomic_u64`].
    ///
    /// # Errors
    /// [`RangeError`] when it does not lie inside or is misaligned.
    pub fn atomic_u32(&self, offset: usize) -> Result<&AtomicU32, RangeError> {
        self.check(offset, 4)?;
        if !offset.is_multiple_of(4) {
            return Err(RangeError { offset, bytes: 4, len: self.len });
        }
        // SAFETY: in bounds, aligned, and valid for any bit pattern.
        Ok(unsafe { AtomicU32::from_ptr(self.base.add(offset).cast()) })
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and every reference into it borrowed from `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_goes_to_its_range_and_then_to_what_is_behind() {
        let memory = SharedMemory::create("test", 4096, Prefault::No).expect("memory");
        let (reader, writer) = rustix::pipe::pipe().expect("descriptors");
        rustix::io::write(&writer, b"abcdefgh").expect("it fits");
        let mut behind = [0; 3];
        let range = memory.writable(4090, 4).expect("the range is inside the memory");
        assert_eq!(range.read(reader.as_fd(), &mut behind), Ok(7));
        assert_eq!(&behind, b"efg");
        let mut bytes = [1; 6];
        memory.copy_to(4090, &mut bytes).expect("it fits");
        assert_eq!(&bytes, b"abcd\0\0");
        drop(writer);
        assert_eq!(range.read(reader.as_fd(), &mut behind), Ok(1));
        assert_eq!(range.read(reader.as_fd(), &mut behind), Ok(0), "the end");
        let (_reader, writer) = rustix::pipe::pipe().expect("descriptors");
        assert_eq!(range.read(writer.as_fd(), &mut behind), Err(rustix::io::Errno::BADF));
        assert_eq!(range.fill(b"12"), 2);
        assert_eq!(range.fill(b"34567"), 4, "no more than there is room for");
        memory.copy_to(4090, &mut bytes).expect("it fits");
        assert_eq!(&bytes, b"3456\0\0");
    }

    #[test]
    fn nothing_is_placed_outside_or_in_what_may_only_be_read() {
        let memory = SharedMemory::create("test", 4096, Prefault::No).expect("memory");
        assert!(memory.writable(4093, 4).is_err() && memory.writable(usize::MAX, 4).is_err());
        let fd = memory.fd().try_clone_to_owned().expect("a descriptor");
        let readers = SharedMemory::from_fd(fd, 4096, Access::ReadOnly).expect("mapped");
        assert!(readers.writable(0, 4).is_err());
    }
}
