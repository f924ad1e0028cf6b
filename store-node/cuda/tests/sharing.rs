//! Memory of a GPU that is shared, through a driver whose GPU is files: `emulated/driver.cpp`.

#[path = "emulated/mod.rs"]
mod emulated;

use std::path::Path;

use emulated::Emulated;
use kvasir_cuda::{
    Asked, Device, Driver, DriverError, IpcHandle, Memory, Registered, SharedAllocation, Stream,
};

#[test]
fn an_allocation_is_opened_by_its_handle_and_all_is_given_back() {
    let Some(emulated) = Emulated::build() else { return };
    {
        let device = Device::open(emulated.driver, 1).expect("a GPU");
        let uuid = device.uuid().expect("a UUID");
        let same = Device::of_uuid(emulated.driver, uuid).expect("that GPU");
        assert_eq!((device.name(), same.name()), ("files 41", "files 41"));
        let stream = Stream::new(&device).expect("a stream");
        let memory = Memory::new(&device, 8192).expect("memory");
        memory.write(&[7u8; 8192], &stream).expect("a copy");
        stream.wait().expect("copies");
        let opened = SharedAllocation::open(&same, memory.ipc_handle().expect("a handle"));
        let opened = opened.expect("it is open");
        assert_eq!(opened.len_bytes(), 8192);
        let mut bytes = vec![0u8; 8192];
        // SAFETY: as many bytes, which nobody touches before the stream was waited for.
        unsafe { opened.write(100, [1u8, 2, 3].as_ptr(), 3, &stream) }.expect("a copy");
        // SAFETY: as above.
        unsafe { opened.read(98, bytes.as_mut_ptr(), 8, &stream) }.expect("a copy");
        stream.wait().expect("copies");
        assert_eq!(bytes[..9], [7, 7, 1, 2, 3, 7, 7, 7, 0]);
        let at = std::ptr::NonNull::new(bytes.as_mut_ptr()).expect("somewhere");
        // SAFETY: the bytes outlive what is made of them.
        let registered = unsafe { Registered::new(&device, at, bytes.len()) }.expect("registered");
        assert_eq!(emulated.registered_bytes(), 8192);
        // SAFETY: as above.
        let again = unsafe { Registered::new(&device, at, bytes.len()) };
        let Err(DriverError::Failed { call, code: 712, .. }) = again else { panic!("{again:?}") };
        assert_eq!(call, "cuMemHostRegister");
        drop(registered);
        assert_eq!(emulated.registered_bytes(), 0);
    }
    assert_eq!(emulated.live(), 0);
}

#[test]
#[should_panic(expected = "beyond the allocation")]
fn nothing_is_copied_beyond_an_allocation() {
    let Some(emulated) = Emulated::build() else { panic!("beyond the allocation: not tried") };
    let device = Device::open(emulated.driver, 0).expect("a GPU");
    let stream = Stream::new(&device).expect("a stream");
    let memory = Memory::new(&device, 4096).expect("memory");
    let opened = SharedAllocation::open(&device, memory.ipc_handle().expect("a handle"));
    let mut byte = [0u8; 2];
    // SAFETY: it panics.
    let _ = unsafe { opened.expect("open").read(4095, byte.as_mut_ptr(), 2, &stream) };
}

#[test]
fn what_is_not_there_is_said() {
    let Some(emulated) = Emulated::build() else { return };
    let asked = Asked::of(emulated.driver).expect("it answers");
    assert_eq!(asked.version, (12, 8));
    let second = &asked.devices[1];
    assert_eq!((&*second.name, second.dma_buf, second.peer_memory), ("files 41", true, false));
    let none = Device::of_uuid(emulated.driver, [0xab; 16]).expect_err("no GPU").to_string();
    let want = format!("no GPU of this host has the UUID {};", "ab".repeat(16));
    assert!(none.starts_with(&want), "{none}");
    let device = Device::open(emulated.driver, 0).expect("a GPU");
    let refused = SharedAllocation::open(&device, IpcHandle([0; 64])).expect_err("no handle");
    let said = refused.to_string();
    assert_eq!(said, "`cuIpcOpenMemHandle` failed with code 1: invalid argument");
    // A driver for copies has no kernels.
    let kernel = kvasir_cuda::Module::load(&device, b"code\0").expect_err("no such function");
    assert!(kernel.to_string().contains("has no `cuModuleLoadData`"), "{kernel}");
}

#[test]
fn a_missing_driver_and_one_without_functions_are_errors() {
    let missing = Driver::open_file(Path::new("/nonexistent/libcuda.so.1")).expect_err("no file");
    let DriverError::Missing { .. } = missing else { panic!("{missing:?}") };
    let said = missing.to_string();
    assert_eq!(said, "cannot open libcuda.so.1: install NVIDIA's driver on a host with a GPU");
    // A library that every process has.
    let other = Driver::open_file(Path::new("libc.so.6")).expect_err("no driver").to_string();
    assert_eq!(other, "libcuda.so.1 has no `cuInit`: install a newer version");
}
