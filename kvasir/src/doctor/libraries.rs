//! What is opened at run time: libibverbs, libfabric with its providers, the CUDA driver and
//! its compiler. A host that lacks one is told in a sentence what it is good for and how to get it.

use kvasir_attention::cuda::CudaError;
use kvasir_attention::cuda::compile::Nvrtc;
use kvasir_attention::cuda::variant::Arch;
use kvasir_cuda::{Asked, DriverError};
use kvasir_transfer_libfabric::info::{InfoError, InfoRequest};
use kvasir_transfer_libfabric::library::{Library as Libfabric, Unavailable};
use kvasir_transfer_verbs::Library as Verbs;

use super::devices::{Devices, RdmaDevice};
use super::report::{Finding, Section};

pub(super) fn section(found: &Devices) -> Section {
    let mut findings = vec![verbs(), libfabric(Libfabric::open()), efa(&found.rdma)];
    let driver = Asked::ask();
    findings.push(peer_memory(found.peer_memory, driver.as_ref().ok()));
    findings.push(cuda(&driver));
    findings.push(nvrtc(Nvrtc::open()));
    Section { title: "libraries that are loaded at run time", findings }
}

fn verbs() -> Finding {
    match Verbs::open().map_err(|error| error.to_string()) {
        Ok(library) => match library.devices() {
            Ok(devices) if devices.is_empty() => Finding::good("libibverbs", "loaded; no devices"),
            Ok(devices) => {
                let names: Vec<&str> = devices.iter().map(|device| device.name()).collect();
                Finding::good("libibverbs", format!("loaded; devices {}", names.join(", ")))
            }
            Err(error) => {
                Finding::advice("libibverbs", format!("loaded, but cannot list devices: {error}"))
            }
        },
        Err(missing) => Finding::absent("libibverbs", missing),
    }
}

/// With the providers that offer what writes need: reliable datagrams with remote writes.
fn libfabric(opened: Result<Libfabric, Unavailable>) -> Finding {
    let library = match opened {
        Ok(library) => library,
        Err(missing) => return Finding::absent("libfabric", missing.to_string()),
    };
    let here = format!("{} at {}", library.version(), library.path().display());
    match library.infos(&InfoRequest::default()) {
        Ok(infos) => {
            let mut providers: Vec<&str> =
                infos.iter().map(|info| info.details().provider.as_str()).collect();
            providers.sort_unstable();
            providers.dedup();
            Finding::good("libfabric", format!("{here}; providers {}", providers.join(", ")))
        }
        Err(InfoError::NoneFits(_)) => Finding::advice(
            "libfabric",
            format!("{here}; no provider offers reliable datagrams with remote writes"),
        ),
        Err(error) => Finding::advice("libfabric", format!("{here}; {error}")),
    }
}

fn efa(devices: &[RdmaDevice]) -> Finding {
    let efa: Vec<&str> =
        devices.iter().filter(|of| of.driver == "efa").map(|of| of.name.as_str()).collect();
    if efa.is_empty() {
        return Finding::absent(
            "EFA",
            "no device of the kernel's driver `efa`: this is not an EC2 instance with EFA",
        );
    }
    Finding::good("EFA", format!("{}; used through libfabric's provider `efa`", efa.join(", ")))
}

fn peer_memory(is_loaded: bool, driver: Option<&Asked>) -> Finding {
    let devices = driver.map_or(&[][..], |driver| &driver.devices);
    let by_dma_buf = devices.iter().filter(|device| device.dma_buf).count();
    match (is_loaded, devices.len()) {
        (true, _) => {
            Finding::good("peer memory", "nvidia_peermem is loaded: NICs can access GPU memory")
        }
        (false, 0) => Finding::absent("peer memory", "this host has no usable GPU"),
        (false, all) if by_dma_buf == all => Finding::good(
            "peer memory",
            "nvidia_peermem is not loaded and not needed: the driver exports GPU memory as DMA buffers",
        ),
        (false, _) => Finding::advice(
            "peer memory",
            "nvidia_peermem is not loaded, and the driver does not export DMA buffers (which needs Linux 5.12 and \
             the open kernel modules): NICs cannot access GPU memory; run `modprobe nvidia_peermem`",
        ),
    }
}

fn cuda(driver: &Result<Asked, DriverError>) -> Finding {
    match driver {
        Err(missing) => Finding::absent("CUDA driver", missing.to_string()),
        Ok(Asked { version: (major, minor), devices }) if devices.is_empty() => {
            Finding::advice("CUDA driver", format!("for CUDA {major}.{minor}; no GPU found"))
        }
        Ok(Asked { version: (major, minor), devices }) => {
            let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
            Finding::good("CUDA driver", format!("for CUDA {major}.{minor}; {}", names.join(", ")))
        }
    }
}

/// It makes the attention kernels of GPUs.
fn nvrtc(opened: Result<Nvrtc, CudaError>) -> Finding {
    match opened {
        Err(missing) => Finding::absent("NVRTC", missing.to_string()),
        Ok(_) => {
            let archs = Arch::ALL.map(Arch::name).join(" and ");
            Finding::good("NVRTC", format!("loaded; compiles attention kernels for {archs}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use kvasir_cuda::AskedDevice;

    use super::*;
    use crate::doctor::report::FindingStatus;

    #[test]
    fn every_library_is_found_or_its_absence_is_a_sentence() {
        let section = section(&Devices::default());
        let whats: Vec<&str> = section.findings.iter().map(|of| of.item.as_str()).collect();
        assert_eq!(
            whats,
            ["libibverbs", "libfabric", "EFA", "peer memory", "CUDA driver", "NVRTC"]
        );
        for finding in &section.findings {
            assert!(finding.detail.contains(' '), "{finding:?}");
        }
    }

    #[test]
    fn an_efa_device_is_named() {
        let device = |driver: &str| RdmaDevice {
            name: "rdmap0s31".into(),
            driver: driver.into(),
            ports: Vec::new(),
        };
        assert!(efa(&[device("efa")]).detail.starts_with("rdmap0s31;"));
        assert_eq!(efa(&[device("mlx5_core")]).status, FindingStatus::Absent);
    }

    #[test]
    fn memory_of_gpus_is_reached_by_a_module_or_as_dma_buffers_or_not() {
        let driver = |dma_buf| {
            let name = "NVIDIA H200".to_owned();
            let devices = vec![AskedDevice { name, dma_buf, peer_memory: true }];
            Asked { version: (12, 8), devices }
        };
        let standing = |is_loaded, driver: Option<&Asked>| peer_memory(is_loaded, driver).status;
        assert_eq!(standing(true, None), FindingStatus::Good);
        assert_eq!(standing(false, None), FindingStatus::Absent);
        assert_eq!(standing(false, Some(&driver(true))), FindingStatus::Good);
        assert_eq!(standing(false, Some(&driver(false))), FindingStatus::Advice);
        assert!(cuda(&Ok(driver(true))).detail.contains("CUDA 12.8; NVIDIA H200"));
    }
}
