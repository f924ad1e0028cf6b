//! Which devices are used: those that are named, all of them, or the first that works.

use kvasir_transfer_verbs::{Context, DeviceInfo, Library, LocalPath, Transport};

use crate::rdma::config::DeviceSpec;
use crate::rdma::{CardError, RdmaDevices};
use crate::topology::CARDS_MAX;

/// A device, and the port and the address of it that are used.
pub(super) struct Chosen {
    pub(super) context: Context,
    pub(super) info: DeviceInfo,
    pub(super) path: LocalPath,
}

/// The devices that were named, or the first on which reliable queue pairs work.
pub(super) fn choose(wanted: &[DeviceSpec]) -> Result<Vec<Chosen>, CardError> {
    let (mut usable, reasons) = all_devices()?;
    let mut chosen: Vec<Chosen> = Vec::new();
    for spec in wanted {
        let DeviceSpec::One { name, port, gid_index } = spec else { continue };
        let Some(at) = usable.iter().position(|device| device.info.name == *name) else {
            let twice = chosen.iter().any(|device| device.info.name == *name);
            let reason = reasons.into_iter().find(|(of, _)| of == name).map(|(_, reason)| reason);
            let missing = || format!("this host has no RDMA device `{name}`");
            let again = twice.then(|| format!("the RDMA device `{name}` is named twice"));
            return Err(CardError::new(again.or(reason).unwrap_or_else(missing)));
        };
        let mut device = usable.remove(at);
        device.path = path_at(&device.info, *port, *gid_index)?;
        chosen.push(device);
    }
    if wanted.contains(&DeviceSpec::All) {
        // Those that were named come first, as they were named.
        let room = CARDS_MAX.saturating_sub(chosen.len());
        for left_out in usable.split_off(usable.len().min(room)) {
            let name = left_out.info.name;
            tracing::warn!(
                device = name,
                "the transfer engine ignores an RDMA device: it uses at most {CARDS_MAX}"
            );
        }
        chosen.append(&mut usable);
    } else if wanted.is_empty() && !usable.is_empty() {
        chosen.push(usable.swap_remove(0));
    }
    if chosen.is_empty() {
        let reasons: Vec<String> = reasons.into_iter().map(|(_, reason)| reason).collect();
        let missing = "this host has no RDMA device".to_owned();
        return Err(CardError::new(if reasons.is_empty() { missing } else { reasons.join("; ") }));
    }
    Ok(chosen)
}

/// A device's name, and why it is of no use.
type Unusable = (String, String);

/// Those that are of use come in the order in which they are taken.
fn all_devices() -> Result<(Vec<Chosen>, Vec<Unusable>), CardError> {
    let library = Library::open().map_err(|error| CardError::because(error.to_string(), error))?;
    let devices =
        library.devices().map_err(|error| CardError::because("cannot list RDMA devices", error))?;
    let (mut usable, mut reasons) = (Vec::new(), Vec::new());
    for device in &devices {
        match usable_device(device) {
            Ok(found) => usable.push(found),
            Err(reason) => reasons.push((device.name().to_owned(), reason)),
        }
    }
    Ok((usable, reasons))
}

/// See [`crate::rdma_devices`].
pub(crate) fn devices() -> Result<RdmaDevices, CardError> {
    let (usable, reasons) = all_devices()?;
    let usable = usable.into_iter().map(|device| device.info.name).collect();
    Ok(RdmaDevices { usable, unusable: reasons.into_iter().map(|(_, reason)| reason).collect() })
}

/// Or why it is of no use.
fn usable_device(device: &kvasir_transfer_verbs::Device) -> Result<Chosen, String> {
    let described = device.open().and_then(|context| Ok((context.describe()?, context)));
    match described {
        Ok((info, _)) if info.transport != Transport::InfiniBand => {
            Err(format!("{} is not an InfiniBand or RoCE device", info.name))
        }
        Ok((info, context)) => match info.path() {
            Some(path) => Ok(Chosen { context, info, path }),
            None => Err(format!("{} has no active port with an address", info.name)),
        },
        Err(error) => Err(format!("cannot use {}: {error}", device.name())),
    }
}

/// The path by this port, and this row of its table of addresses.
fn path_at(
    info: &DeviceInfo,
    port: Option<u8>,
    gid_index: Option<u8>,
) -> Result<LocalPath, CardError> {
    let ports = info.ports.iter().filter(|of| port.is_none_or(|port| of.port.0 == port));
    let mut paths = ports.filter_map(|of| Some((of, of.path()?)));
    let (of, path) = paths.next().ok_or_else(|| {
        let named =
            port.map_or("no active port".to_owned(), |port| format!("no active port {port}"));
        CardError::new(format!("{} has {named} with an address", info.name))
    })?;
    let Some(index) = gid_index else { return Ok(path) };
    let row = of.gids.iter().find(|row| row.index.0 == index).ok_or_else(|| {
        CardError::new(format!("port {} of {} has no GID {index}", of.port.0, info.name))
    })?;
    Ok(LocalPath { gid: row.gid, gid_index: row.index, ..path })
}
