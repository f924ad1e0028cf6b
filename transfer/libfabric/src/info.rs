//! What a host has: `fi_getinfo`, and the rule by which one of its answers is chosen.

use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::ptr::{self, NonNull};

use crate::bindings::*;
use crate::error::Failure;
use crate::library::{Library, Version};

/// The provider that this crate is made for.
pub const EFA: &str = "efa";

/// The provider for processes of one host, for development.
pub(crate) const SHM: &str = "shm";

/// Who serialises calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Threading {
    /// The provider, with locks of its own (`FI_THREAD_SAFE`).
    #[default]
    Safe,
    /// This crate, with one lock per domain, which is free where one thread drives the domain; the
    /// provider then takes none (`FI_THREAD_DOMAIN`).
    Domain,
}

/// What to look for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InfoRequest {
    /// Only this provider (`efa`, `shm`, `tcp`, `tcp;ofi_rxm`); all, where none is named.
    pub provider: Option<String>,
    /// The local address or host name to be reached under. For providers over sockets; without it
    /// they offer one answer per interface.
    pub source: Option<String>,
    pub threading: Threading,
    /// Whether memory of devices is to be registered too (`FI_HMEM`).
    pub device_memory: bool,
    /// Whether arrivals are to say who wrote (`FI_SOURCE`). Only of peers that are in the address
    /// vector, and only where the provider knows. What is layered over `ofi_rxm` says something wrong
    /// (seen with 1.17), so it is not believed.
    pub arrival_sources: bool,
}

/// Why nothing can be listed or chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InfoError {
    /// No provider here offers what this crate needs.
    #[error("no libfabric provider on this host offers reliable datagrams with remote writes")]
    NoneFits(#[source] Failure),
    #[error("`{name}` contains a zero byte")]
    Name { name: String },
    #[error("libfabric cannot list its providers")]
    Failed(#[source] Failure),
}

/// There is no `efa`, and not what was asked for either.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this host has neither the provider efa nor {asked}; available: {found}")]
pub struct NotFound {
    pub asked: String,
    pub found: String,
}

/// What providers demand of memory and its description.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryMode(u32);

impl MemoryMode {
    /// Local buffers must be registered too. Here they always are.
    pub fn local(self) -> bool {
        self.0 & FI_MR_LOCAL != 0
    }

    /// Peers name a place in a region by its virtual address, else by its offset.
    pub fn virtual_addresses(self) -> bool {
        self.0 & FI_MR_VIRT_ADDR != 0
    }

    /// Pages must be present when the region is registered, and stay.
    pub fn allocated(self) -> bool {
        self.0 & FI_MR_ALLOCATED != 0
    }

    /// The provider chooses the keys, else this crate does.
    pub fn provider_keys(self) -> bool {
        self.0 & FI_MR_PROV_KEY != 0
    }
}

/// What moves data and completions on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The provider or the device by itself.
    Auto,
    /// Only calls of the owner: poll the queue, on the receiving side too, or nothing arrives.
    Manual,
}

/// Where a device is on its PCI bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PciAddress {
    pub domain: u16,
    pub bus: u8,
    pub device: u8,
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

/// The network interface behind a domain, where the provider tells.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Nic {
    pub name: String,
    pub driver: String,
    pub pci: Option<PciAddress>,
    pub link_bits_per_s: u64,
    pub mtu_bytes: u64,
}

/// What an [`Info`] says, as plain values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Details {
    pub provider: String,
    pub fabric: String,
    pub domain: String,
    pub nic: Option<Nic>,
    pub interface: Version,
    /// The longest write or message.
    pub message_bytes_max: usize,
    /// The longest write that may be injected; the endpoint may say less.
    pub inject_bytes_max: usize,
    /// How much an immediate can hold; at least 4.
    pub immediate_bytes: usize,
    /// What the provider's own queues hold.
    pub send_queue_size: usize,
    pub receive_queue_size: usize,
    pub memory_mode: MemoryMode,
    pub key_bytes: usize,
    pub progress: Progress,
    pub device_memory: bool,
    /// Asked for and offered; see [`InfoRequest::arrival_sources`].
    pub arrival_sources: bool,
}

/// One way to reach peers: an answer of `fi_getinfo`.
pub struct Info {
    library: Library,
    raw: NonNull<fi_info>,
    details: Details,
    threading: Threading,
}

// SAFETY: after it was made the structure is only read, here and (through a copy) by libfabric.
unsafe impl Send for Info {}
// SAFETY: as above.
unsafe impl Sync for Info {}

impl Library {
    /// Lists the ways to reach peers that this host has, in libfabric's order of preference.
    ///
    /// # Errors
    /// [`InfoError::NoneFits`] where there is none.
    pub fn infos(self, request: &InfoRequest) -> Result<Vec<Info>, InfoError> {
        let provider = request.provider.as_deref().map(c_string).transpose()?;
        let source = request.source.as_deref().map(c_string).transpose()?;
        let hints = Hints::new(self, request, provider.as_deref())?;
        let as_ptr = |text: &Option<CString>| text.as_ref().map_or(ptr::null(), |t| t.as_ptr());
        let flags = if source.is_some() { FI_SOURCE } else { 0 };
        let mut list = ptr::null_mut();
        // SAFETY: strings and hints live until after the call, and `list` is written on success.
        let result = unsafe {
            (self.symbols().getinfo)(
                self.interface().packed(),
                as_ptr(&source),
                ptr::null(),
                flags,
                hints.raw.as_ptr(),
                &mut list,
            )
        };
        drop(hints);
        match result {
            0 => Ok(self.take_list(list, request.threading)),
            result if result == -FI_ENODATA => {
                Err(InfoError::NoneFits(self.failure("fi_getinfo", result)))
            }
            result => Err(InfoError::Failed(self.failure("fi_getinfo", result))),
        }
    }

    /// Copies each element of a list into an [`Info`] of its own, and frees the list.
    fn take_list(self, list: *mut fi_info, threading: Threading) -> Vec<Info> {
        let mut infos = Vec::new();
        let mut next = list;
        while let Some(one) = NonNull::new(next) {
            infos.extend(Info::copy_of(self, one, threading));
            // SAFETY: an element of a list that libfabric made and that is freed below.
            next = unsafe { (*one.as_ptr()).next };
        }
        if !list.is_null() {
            // SAFETY: `fi_getinfo` made it, and nothing refers to it any more.
            unsafe { (self.symbols().freeinfo)(list) };
        }
        infos
    }
}

/// Chooses: `efa` where there is one, else the provider that was asked for. `tcp` also means the
/// layered form that older libfabrics offer, `tcp;ofi_rxm`.
///
/// # Errors
/// [`NotFound`], with what there is.
pub fn choose<'a>(infos: &'a [Info], asked: &str) -> Result<&'a Info, NotFound> {
    let named = |name: &str| {
        infos.iter().find(|info| {
            let provider = info.details.provider.as_str();
            provider == name
                || provider.strip_prefix(name).is_some_and(|rest| rest.starts_with(';'))
        })
    };
    named(EFA).or_else(|| named(asked)).ok_or_else(|| {
        let mut found: Vec<&str> = infos.iter().map(|i| i.details.provider.as_str()).collect();
        found.dedup();
        NotFound { asked: asked.into(), found: found.join(", ") }
    })
}

impl Info {
    fn copy_of(library: Library, from: NonNull<fi_info>, threading: Threading) -> Option<Self> {
        // SAFETY: a live element; the copy has no successor.
        let copy = unsafe { (library.symbols().dupinfo)(from.as_ptr()) };
        let raw = NonNull::new(copy)?;
        // SAFETY: just made, and not shared yet.
        let details = unsafe { read_details(raw.as_ref()) };
        let info = Info { library, raw, details: details?, threading };
        Some(info)
    }

    /// A copy for calls that take a mutable structure.
    pub(crate) fn duplicate(&self) -> Option<Self> {
        Self::copy_of(self.library, self.raw, self.threading)
    }

    pub fn details(&self) -> &Details {
        &self.details
    }

    pub fn library(&self) -> Library {
        self.library
    }

    pub(crate) fn threading(&self) -> Threading {
        self.threading
    }

    pub(crate) fn as_ptr(&self) -> *mut fi_info {
        self.raw.as_ptr()
    }

    /// How addresses of peers look, as libfabric numbers it.
    pub(crate) fn address_format(&self) -> u32 {
        // SAFETY: live, and only read.
        unsafe { self.raw.as_ref() }.addr_format
    }

    pub(crate) fn fabric_attributes(&self) -> *mut fi_fabric_attr {
        // SAFETY: live, and only read.
        unsafe { self.raw.as_ref() }.fabric_attr
    }

    /// The kind of address vector that the provider prefers, or the usual one.
    pub(crate) fn address_vector_type(&self) -> u32 {
        // SAFETY: live; `read_details` saw that the domain's attributes are there.
        let preferred = unsafe { (*self.raw.as_ref().domain_attr).av_type };
        if preferred == FI_AV_MAP { FI_AV_MAP } else { FI_AV_TABLE }
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: `fi_dupinfo` made it for this value alone.
        unsafe { (self.library.symbols().freeinfo)(self.raw.as_ptr()) };
    }
}

impl fmt::Debug for Info {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Info").field("details", &self.details).finish_non_exhaustive()
    }
}

fn c_string(name: &str) -> Result<CString, InfoError> {
    CString::new(name).map_err(|_| InfoError::Name { name: name.into() })
}

/// What is asked for. Freed by libfabric, but for the name, which is ours.
struct Hints {
    library: Library,
    raw: NonNull<fi_info>,
}

impl Hints {
    fn new(
        library: Library,
        request: &InfoRequest,
        provider: Option<&CStr>,
    ) -> Result<Self, InfoError> {
        // SAFETY: null asks for an empty structure with all its parts.
        let made = unsafe { (library.symbols().dupinfo)(ptr::null()) };
        let Some(raw) = NonNull::new(made) else {
            return Err(InfoError::Failed(library.failure("fi_allocinfo", -FI_ENOMEM)));
        };
        let hints = Hints { library, raw };
        // SAFETY: just made with all its parts, and ours alone.
        unsafe {
            let info = &mut *raw.as_ptr();
            info.caps = FI_MSG | FI_RMA;
            info.mode = FI_CONTEXT | FI_CONTEXT2;
            // Writes complete when they are in the target's memory: an empty write that follows the
            // completion of others is then a statement about them. It also keeps provider `shm` from
            // writing past the receiver's checks.
            (*info.tx_attr).op_flags = FI_DELIVERY_COMPLETE;
            (*info.ep_attr).r#type = FI_EP_RDM;
            let domain = &mut *info.domain_attr;
            domain.mr_mode =
                (FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY) as i32;
            domain.cq_data_size = size_of::<u32>();
            domain.threading = match request.threading {
                Threading::Safe => FI_THREAD_SAFE,
                Threading::Domain => FI_THREAD_DOMAIN,
            };
            if request.arrival_sources {
                info.caps |= FI_SOURCE;
            }
            if request.device_memory {
                info.caps |= FI_HMEM;
                domain.mr_mode |= FI_MR_HMEM as i32;
            }
            (*info.fabric_attr).prov_name =
                provider.map_or(ptr::null_mut(), |name| name.as_ptr().cast_mut());
        }
        Ok(hints)
    }
}

impl Drop for Hints {
    fn drop(&mut self) {
        // SAFETY: ours alone. The name is taken out first, because libfabric would free it with the
        // C library's allocator, which did not make it.
        unsafe {
            (*(*self.raw.as_ptr()).fabric_attr).prov_name = ptr::null_mut();
            (self.library.symbols().freeinfo)(self.raw.as_ptr());
        }
    }
}

/// # Safety
/// Null or a C string that lives as long as the call.
unsafe fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: not null; the caller's promise.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}

/// `None` when parts are missing, which no provider leaves out.
///
/// # Safety
/// As libfabric made it: every part is null or valid.
unsafe fn read_details(info: &fi_info) -> Option<Details> {
    // SAFETY: null or valid, as the caller promises.
    let (tx, rx, ep, domain, fabric) = unsafe {
        (
            info.tx_attr.as_ref()?,
            info.rx_attr.as_ref()?,
            info.ep_attr.as_ref()?,
            info.domain_attr.as_ref()?,
            info.fabric_attr.as_ref()?,
        )
    };
    // SAFETY: names are null or C strings.
    let provider = unsafe { text(fabric.prov_name) };
    Some(Details {
        // SAFETY: as above.
        fabric: unsafe { text(fabric.name) },
        // SAFETY: as above.
        domain: unsafe { text(domain.name) },
        // SAFETY: null or valid.
        nic: unsafe { info.nic.as_ref().map(|nic| read_nic(nic)) },
        interface: Version::new((fabric.api_version >> 16) as u16, fabric.api_version as u16),
        message_bytes_max: ep.max_msg_size,
        inject_bytes_max: tx.inject_size,
        immediate_bytes: domain.cq_data_size,
        send_queue_size: tx.size,
        receive_queue_size: rx.size,
        memory_mode: MemoryMode(domain.mr_mode as u32),
        key_bytes: domain.mr_key_size,
        progress: if domain.data_progress == FI_PROGRESS_AUTO {
            Progress::Auto
        } else {
            Progress::Manual
        },
        device_memory: info.caps & FI_HMEM != 0,
        arrival_sources: info.caps & FI_SOURCE != 0 && !provider.contains("ofi_rxm"),
        provider,
    })
}

/// # Safety
/// As libfabric made it: every part is null or valid.
unsafe fn read_nic(nic: &fid_nic) -> Nic {
    let mut found = Nic::default();
    // SAFETY: null or valid, and the names in it null or C strings.
    unsafe {
        if let Some(device) = nic.device_attr.as_ref() {
            found.name = text(device.name);
            found.driver = text(device.driver);
        }
        if let Some(bus) = nic.bus_attr.as_ref().filter(|bus| bus.bus_type == FI_BUS_PCI) {
            found.pci = Some(PciAddress {
                domain: bus.pci.domain_id,
                bus: bus.pci.bus_id,
                device: bus.pci.device_id,
                function: bus.pci.function_id,
            });
        }
        if let Some(link) = nic.link_attr.as_ref() {
            found.link_bits_per_s = link.speed as u64;
            found.mtu_bytes = link.mtu as u64;
        }
    }
    found
}
