//! Which device a process computes on, and which backend moves its tensors.

use crate::error::{Result, StateError};
use accelerate_core::settings::Origin;
use tch::Device;

/// The device by the reference's rule: the CPU if asked for, else the GPU `local_rank mod count`, else the CPU.
/// `wanted` is `torch_device` and where it was said, which overrides the rule.
pub(super) fn choose(cpu: bool, wanted: Option<(&str, &Origin)>, local_rank: usize) -> Result<Device> {
    let count = usize::try_from(tch::Cuda::device_count()).unwrap_or(0);
    decide(cpu, wanted, local_rank, count)
}

fn decide(cpu: bool, wanted: Option<(&str, &Origin)>, local_rank: usize, cuda_devices: usize) -> Result<Device> {
    let Some((name, origin)) = wanted else {
        return Ok(match cuda_devices {
            0 => Device::Cpu,
            _ if cpu => Device::Cpu,
            count => Device::Cuda(local_rank % count),
        });
    };
    let unknown = || StateError::UnknownDevice { name: name.to_owned(), origin: origin.to_string(), cuda_devices };
    let index = match name.split_once(':') {
        None if name == "cpu" => return Ok(Device::Cpu),
        None if name == "cuda" => local_rank % cuda_devices.max(1),
        Some(("cuda", index)) => index.parse().map_err(|_| unknown())?,
        _ => return Err(unknown().into()),
    };
    if index < cuda_devices { Ok(Device::Cuda(index)) } else { Err(unknown().into()) }
}

/// The backend for tensors on `device`; `wanted` is `InitProcessGroupKwargs.backend`.
pub(super) fn backend(device: Device, wanted: Option<&str>) -> Result<&'static str> {
    match (wanted, device) {
        // The reference's default for the field is "nccl", which there too means Gloo on the CPU.
        (None, Device::Cpu) | (Some("gloo"), _) => Ok("gloo"),
        (Some("cpu:gloo" | "cpu:gloo,cuda:nccl" | "cuda:nccl,cpu:gloo"), Device::Cpu) => Ok("gloo"),
        (None | Some("nccl" | "cuda:nccl,cpu:gloo" | "cpu:gloo,cuda:nccl"), Device::Cuda(_)) => Ok("nccl"),
        (Some(name), device) => {
            Err(StateError::UnknownBackend { name: name.to_owned(), device: format!("{device:?}") }.into())
        }
        (None, _) => Ok("gloo"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use accelerate_core::settings::Position;

    #[test]
    fn devices_are_dealt_out_in_turn() {
        for (cpu, wanted, local_rank, count, expected) in [
            (false, None, 0, 0, Device::Cpu),
            (true, None, 1, 4, Device::Cpu),
            (false, None, 5, 4, Device::Cuda(1)),
            (true, Some("cuda:2"), 0, 4, Device::Cuda(2)),
            (false, Some("cuda"), 3, 2, Device::Cuda(1)),
            (false, Some("cpu"), 0, 2, Device::Cpu),
        ] {
            let wanted = wanted.map(|name| (name, &Origin::Code));
            assert_eq!(decide(cpu, wanted, local_rank, count).unwrap(), expected, "{wanted:?}");
        }
    }

    #[test]
    fn devices_that_do_not_exist_are_named() {
        let origin = Origin::File { path: "run.yaml".into(), position: Some(Position { line: 3, column: 1 }) };
        for name in ["cuda:4", "cuda:x", "tpu", "cuda:-1"] {
            let error = decide(false, Some((name, &origin)), 0, 4).unwrap_err();
            assert!(error.is_config() && error.to_string().contains(name), "{error}");
            assert!(error.to_string().contains("(run.yaml:3:1)"), "the place is named where it was said: {error}");
        }
        assert!(decide(false, Some(("cuda", &origin)), 0, 0).is_err());
    }

    #[test]
    fn backends_fit_their_device() {
        assert_eq!(backend(Device::Cpu, None).unwrap(), "gloo");
        assert_eq!(backend(Device::Cuda(0), None).unwrap(), "nccl");
        assert_eq!(backend(Device::Cuda(0), Some("gloo")).unwrap(), "gloo");
        assert!(backend(Device::Cpu, Some("nccl")).unwrap_err().to_string().contains("nccl"));
        assert!(backend(Device::Cpu, Some("mpi")).unwrap_err().to_string().contains("mpi"));
    }
}
