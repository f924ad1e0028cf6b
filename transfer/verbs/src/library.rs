//! libibverbs, opened at run time: nothing is linked, and a host without it is told so in a sentence.
//! The calls themselves are made in the files that own the objects they are about.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::bindings::{
    ibv_ah, ibv_ah_attr, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device,
    ibv_device_attr, ibv_gid_entry, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr,
};
use crate::context::Context;
use crate::error::VerbsError;

const FILE: &str = "libibverbs.so.1";

/// Why this process cannot use RDMA. Its text is a sentence for the person who runs the host.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    #[error(
        "RDMA is not available: cannot open {FILE}; install it with `apt-get install libibverbs1 \
         ibverbs-providers` or `dnf install libibverbs`"
    )]
    Missing(#[source] libloading::Error),
    #[error("RDMA is not available: {FILE} has no `{symbol}`; install rdma-core 34 or later")]
    TooOld {
        symbol: &'static str,
        #[source]
        source: libloading::Error,
    },
}

/// The functions that are called, and the library that they lie in.
#[derive(Debug)]
pub(crate) struct Api {
    pub(crate) get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device,
    pub(crate) free_device_list: unsafe extern "C" fn(*mut *mut ibv_device),
    pub(crate) get_device_name: unsafe extern "C" fn(*mut ibv_device) -> *const c_char,
    pub(crate) open_device: unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context,
    pub(crate) close_device: unsafe extern "C" fn(*mut ibv_context) -> c_int,
    pub(crate) query_device: unsafe extern "C" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int,
    pub(crate) query_port: unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int,
    pub(crate) query_gid_table:
        unsafe extern "C" fn(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize,
    pub(crate) get_async_event:
        unsafe extern "C" fn(*mut ibv_context, *mut ibv_async_event) -> c_int,
    pub(crate) ack_async_event: unsafe extern "C" fn(*mut ibv_async_event),
    pub(crate) alloc_pd: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_pd,
    pub(crate) dealloc_pd: unsafe extern "C" fn(*mut ibv_pd) -> c_int,
    pub(crate) reg_mr_iova2:
        unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr,
    pub(crate) reg_dmabuf_mr:
        unsafe extern "C" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr,
    pub(crate) dereg_mr: unsafe extern "C" fn(*mut ibv_mr) -> c_int,
    pub(crate) create_comp_channel: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_comp_channel,
    pub(crate) destroy_comp_channel: unsafe extern "C" fn(*mut ibv_comp_channel) -> c_int,
    pub(crate) get_cq_event:
        unsafe extern "C" fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int,
    pub(crate) ack_cq_events: unsafe extern "C" fn(*mut ibv_cq, c_uint),
    pub(crate) create_cq: unsafe extern "C" fn(
        *mut ibv_context,
        c_int,
        *mut c_void,
        *mut ibv_comp_channel,
        c_int,
    ) -> *mut ibv_cq,
    pub(crate) destroy_cq: unsafe extern "C" fn(*mut ibv_cq) -> c_int,
    pub(crate) create_qp: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp,
    pub(crate) modify_qp: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int,
    pub(crate) query_qp:
        unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int,
    pub(crate) destroy_qp: unsafe extern "C" fn(*mut ibv_qp) -> c_int,
    pub(crate) create_ah: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah,
    pub(crate) destroy_ah: unsafe extern "C" fn(*mut ibv_ah) -> c_int,
    /// Never closed: drivers that it has opened leave handlers behind that run when the process ends.
    _file: ManuallyDrop<libloading::Library>,
}

/// One function of the library.
///
/// # Safety
/// `F` is the type that the function has in C.
unsafe fn function<F: Copy>(
    file: &libloading::Library,
    symbol: &'static str,
) -> Result<F, Unavailable> {
    // SAFETY: the caller answers for the type.
    let found = unsafe { file.get::<F>(symbol) };
    found.map(|found| *found).map_err(|source| Unavailable::TooOld { symbol, source })
}

impl Api {
    fn open(name: &OsStr) -> Result<Self, Unavailable> {
        // SAFETY: opening libibverbs runs its initialisers, which touch nothing of ours.
        let file = unsafe { libloading::Library::new(name) }.map_err(Unavailable::Missing)?;
        // SAFETY: the types of the fields are those of `infiniband/verbs.h`; the parts of structures
        // that they share are checked against it in `layout.rs`.
        unsafe {
            Ok(Api {
                get_device_list: function(&file, "ibv_get_device_list")?,
                free_device_list: function(&file, "ibv_free_device_list")?,
                get_device_name: function(&file, "ibv_get_device_name")?,
                open_device: function(&file, "ibv_open_device")?,
                close_device: function(&file, "ibv_close_device")?,
                query_device: function(&file, "ibv_query_device")?,
                query_port: function(&file, "ibv_query_port")?,
                query_gid_table: function(&file, "_ibv_query_gid_table")?,
                get_async_event: function(&file, "ibv_get_async_event")?,
                ack_async_event: function(&file, "ibv_ack_async_event")?,
                alloc_pd: function(&file, "ibv_alloc_pd")?,
                dealloc_pd: function(&file, "ibv_dealloc_pd")?,
                reg_mr_iova2: function(&file, "ibv_reg_mr_iova2")?,
                reg_dmabuf_mr: function(&file, "ibv_reg_dmabuf_mr")?,
                dereg_mr: function(&file, "ibv_dereg_mr")?,
                create_comp_channel: function(&file, "ibv_create_comp_channel")?,
                destroy_comp_channel: function(&file, "ibv_destroy_comp_channel")?,
                get_cq_event: function(&file, "ibv_get_cq_event")?,
                ack_cq_events: function(&file, "ibv_ack_cq_events")?,
                create_cq: function(&file, "ibv_create_cq")?,
                destroy_cq: function(&file, "ibv_destroy_cq")?,
                create_qp: function(&file, "ibv_create_qp")?,
                modify_qp: function(&file, "ibv_modify_qp")?,
                query_qp: function(&file, "ibv_query_qp")?,
                destroy_qp: function(&file, "ibv_destroy_qp")?,
                create_ah: function(&file, "ibv_create_ah")?,
                destroy_ah: function(&file, "ibv_destroy_ah")?,
                _file: ManuallyDrop::new(file),
            })
        }
    }
}

/// libibverbs. Cheap to clone; everything made through it holds it.
///
/// ```no_run
/// let library = kvasir_transfer_verbs::Library::open()?;
/// for device in library.devices()? {
///     let context = device.open()?;
///     println!("{:?}", context.describe()?);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Library {
    api: Arc<Api>,
}

impl Library {
    /// # Errors
    /// [`Unavailable`], whose text says what to install.
    pub fn open() -> Result<Self, Unavailable> {
        Library::open_file(OsStr::new(FILE))
    }

    fn open_file(name: &OsStr) -> Result<Self, Unavailable> {
        Ok(Library { api: Arc::new(Api::open(name)?) })
    }

    /// The devices of this host that have a driver; none where the kernel has no RDMA at all.
    ///
    /// # Errors
    /// [`VerbsError`] when the list cannot be read.
    pub fn devices(&self) -> Result<Vec<Device>, VerbsError> {
        let mut count: c_int = 0;
        // SAFETY: `count` outlives the call.
        let list = unsafe { (self.api.get_device_list)(&raw mut count) };
        let Some(list) = NonNull::new(list) else {
            return match VerbsError::new("ibv_get_device_list", io::Error::last_os_error()) {
                VerbsError::Unsupported { .. } => Ok(Vec::new()),
                error => Err(error),
            };
        };
        let list = Arc::new(DeviceList { list, api: Arc::clone(&self.api) });
        let indices = 0..usize::try_from(count).unwrap_or(0);
        Ok(indices.filter_map(|index| Device::at(&list, index)).collect())
    }

    /// The device of that name, if the host has it.
    ///
    /// # Errors
    /// As [`Library::devices`].
    pub fn device(&self, name: &str) -> Result<Option<Device>, VerbsError> {
        Ok(self.devices()?.into_iter().find(|device| device.name() == name))
    }
}

/// Devices are valid while the list that named them is.
#[derive(Debug)]
struct DeviceList {
    list: NonNull<*mut ibv_device>,
    api: Arc<Api>,
}

// SAFETY: the list is only read until it is freed, once, in drop; libibverbs guards its own state.
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from `ibv_get_device_list`, and no `Device` of it is left.
        unsafe { (self.api.free_device_list)(self.list.as_ptr()) }
    }
}

/// One RDMA device of this host.
#[derive(Debug, Clone)]
pub struct Device {
    device: NonNull<ibv_device>,
    name: String,
    list: Arc<DeviceList>,
}

// SAFETY: the device is only passed to libibverbs, which allows calls from all threads.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    fn at(list: &Arc<DeviceList>, index: usize) -> Option<Self> {
        // SAFETY: `index` is below the count that came with the list.
        let device = NonNull::new(unsafe { *list.list.as_ptr().add(index) })?;
        // SAFETY: the device is of a list that is held; its name ends with a zero and lives as long.
        let name = unsafe { CStr::from_ptr((list.api.get_device_name)(device.as_ptr())) };
        let name = name.to_string_lossy().into_owned();
        Some(Device { device, name, list: Arc::clone(list) })
    }

    /// As in `ibv_devices`, for example `mlx5_0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// # Errors
    /// [`VerbsError::Denied`] without access to `/dev/infiniband`, and others.
    pub fn open(&self) -> Result<Context, VerbsError> {
        // SAFETY: the device is of a list that is held.
        let context = unsafe { (self.list.api.open_device)(self.device.as_ptr()) };
        let context = NonNull::new(context).ok_or_else(|| VerbsError::last("ibv_open_device"))?;
        // SAFETY: the device is valid, and its transport never changes.
        let transport = unsafe { (*self.device.as_ptr()).transport_type };
        Context::new(Arc::clone(&self.list.api), context, self.name.clone(), transport)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_libibverbs_is_told_what_to_install() {
        let error = Library::open_file(OsStr::new("libibverbs-of-nobody.so.9"));
        let error = error.expect_err("there is no such file");
        assert!(matches!(error, Unavailable::Missing(_)));
        let text = error.to_string();
        assert!(text.contains("apt-get install libibverbs1 ibverbs-providers"), "{text}");
        assert!(!text.contains('\n'), "one sentence: {text}");
    }

    #[test]
    fn a_library_that_lacks_a_function_is_told_from_one_that_is_missing() {
        // Every process has this one, and it has no verbs.
        let error = Library::open_file(OsStr::new("libc.so.6")).expect_err("not libibverbs");
        assert!(matches!(error, Unavailable::TooOld { symbol: "ibv_get_device_list", .. }));
        assert!(error.to_string().contains("install rdma-core 34 or later"));
    }
}
