//! State of many parameters in one piece of memory: one allocation in place of hundreds, and one operation where all elements
//! change alike.

use crate::error::Result;
use tch::Tensor;
use torch_ext::{TensorVec, foreach, scalar};

/// Where a tensor begins in the shared memory: kernels of GPUs want 16 bytes for their widest loads, and no two tensors share
/// a cache line.
const ALIGNMENT: usize = 64;

/// For each of `params`, which have one type and device, `N` tensors of its size, full of `value`: one memory for all, in which
/// the first tensors of all parameters lie one behind the other, then the second ones.
///
/// Those of parameters that are not contiguous have their strides, and memory of their own.
pub(super) fn full_like<const N: usize>(params: &[Tensor], value: f64) -> Result<Vec<[Tensor; N]>> {
    let Some(first) = params.first() else { return Ok(Vec::new()) };
    let options = (first.f_kind()?, first.device());
    let element_bytes = options.0.elt_size_in_bytes().max(1);
    let room = |param: &Tensor| match param.is_contiguous() {
        true => param.numel().next_multiple_of(ALIGNMENT / element_bytes),
        false => 0,
    };
    let plane: usize = params.iter().map(room).sum();
    let memory = scalar::full(&[(N * plane) as i64], value, options)?;
    let mut start = 0;
    let mut tensors = Vec::with_capacity(params.len());
    for param in params {
        let tensor = |number: usize| -> Result<Tensor> {
            if !param.is_contiguous() {
                let tensor = param.f_empty_like()?;
                scalar::fill_(&tensor, value)?;
                return Ok(tensor);
            }
            let part = memory.f_narrow(0, (number * plane + start) as i64, param.numel() as i64)?;
            Ok(part.f_view(param.size().as_slice())?)
        };
        let all: Vec<Tensor> = (0..N).map(tensor).collect::<Result<_>>()?;
        tensors.extend(<[Tensor; N]>::try_from(all).ok());
        start += room(param);
    }
    Ok(tensors)
}

/// One tensor of zeros for each of `params`, as [`full_like`].
pub(super) fn zeros_like(params: &[Tensor]) -> Result<Vec<Tensor>> {
    Ok(full_like::<1>(params, 0.0)?.into_iter().flatten().collect())
}

/// Gives each of the parameters at `slots` that has no state yet what `make` makes for all of these.
pub(super) fn begin<S>(
    states: &mut [Option<S>],
    slots: &[usize],
    params: &TensorVec,
    make: impl FnOnce(&[Tensor]) -> Result<Vec<S>>,
) -> Result<()> {
    let is_new = |(&slot, param): (&usize, Tensor)| states[slot].is_none().then_some((slot, param));
    let (new, params): (Vec<usize>, Vec<Tensor>) = slots.iter().zip(params.iter()).filter_map(is_new).unzip();
    for (slot, state) in new.into_iter().zip(make(&params)?) {
        states[slot] = Some(state);
    }
    Ok(())
}

/// How many steps each parameter of a batch has taken.
#[derive(Debug)]
pub(super) struct Steps {
    /// Float scalars, for kernels.
    pub(super) each: TensorVec,
    /// `[num_params]`: the same.
    all: TensorVec,
}

impl Steps {
    /// Moves the counts of the parameters at `slots`, which all have state, next to each other.
    pub(super) fn of<S>(
        states: &mut [Option<S>],
        slots: &[usize],
        step: impl Fn(&mut S) -> &mut Tensor,
    ) -> Result<Self> {
        let mut counts = Vec::with_capacity(slots.len());
        for &slot in slots {
            counts.extend(states[slot].as_mut().map(|state| step(state).shallow_clone()));
        }
        let all = Tensor::f_stack(&counts, 0)?;
        let counts = all.f_unbind(0)?;
        for (&slot, count) in slots.iter().zip(&counts) {
            if let Some(state) = &mut states[slot] {
                *step(state) = count.shallow_clone();
            }
        }
        Ok(Self { each: counts.iter().collect(), all: [&all].into_iter().collect() })
    }

    /// Counts a step of every parameter.
    pub(super) fn count(&self) -> Result<()> {
        Ok(foreach::add_scalar_(&self.all, 1.0)?)
    }

    /// Takes it back where `is_skipped`, a scalar on the same device, is one and not zero: without waiting for it.
    pub(super) fn take_back(&self, is_skipped: &Tensor) -> Result<()> {
        Ok(foreach::add_(&self.all, &[is_skipped], -1.0)?)
    }
}

/// `found_inf`, copied to the device of a batch if it is on another one: parameters that are offloaded are not where losses are scaled. A
/// copy to the CPU waits for the device.
pub(super) fn found_inf_beside(tensors: &TensorVec, found_inf: Option<&Tensor>) -> Result<Option<Tensor>> {
    let (Some(found_inf), false) = (found_inf, tensors.is_empty()) else { return Ok(None) };
    Ok(Some(found_inf.f_to_device(tensors.get(0)?.device())?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tch::{Device, Kind};
    use torch_ext::storage::storage_id;

    const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

    #[test]
    fn tensors_share_memory_and_no_cache_lines() {
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
            let shapes: [&[i64]; 7] = [&[3, 5], &[], &[0], &[16], &[17], &[2, 1, 700], &[0, 4]];
            let params = shapes.map(|shape| Tensor::zeros(shape, (kind, Device::Cpu)));
            let tensors = full_like::<2>(&params, 1.5).unwrap();
            assert_eq!(tensors.len(), params.len());
            let mut number = 0.0;
            let mut end = tensors[0][0].data_ptr() as usize;
            assert!(end.is_multiple_of(ALIGNMENT));
            for plane in 0..2 {
                for (own, param) in tensors.iter().zip(&params) {
                    let tensor = &own[plane];
                    assert_eq!((tensor.size(), tensor.stride(), tensor.kind()), (param.size(), param.stride(), kind));
                    assert_eq!(storage_id(tensor), storage_id(&tensors[0][0]));
                    assert!(tensor.numel() == 0 || tensor.data_ptr() as usize == end);
                    end = (end + tensor.numel() * kind.elt_size_in_bytes()).next_multiple_of(ALIGNMENT);
                    assert_eq!(tensor.eq(1.5).all().int64_value(&[]), 1);
                    let _ = tensor.shallow_clone().fill_(number);
                    number += 1.0;
                }
            }
            number = 0.0;
            for tensor in (0..2).flat_map(|plane| tensors.iter().map(move |own| &own[plane])) {
                assert!(tensor.eq(number).all().int64_value(&[]) == 1, "another has overwritten {number}");
                number += 1.0;
            }
        }
        assert!(full_like::<1>(&[], 0.0).unwrap().is_empty());
    }

    #[test]
    fn what_is_not_contiguous_keeps_its_strides() {
        let params = [Tensor::zeros([2, 3], FLOAT), Tensor::zeros([2, 3], FLOAT).tr(), Tensor::zeros([4], FLOAT)];
        let tensors: Vec<Tensor> = full_like::<1>(&params, -1.0).unwrap().into_iter().flatten().collect();
        assert_eq!(tensors[1].stride(), params[1].stride());
        assert!(tensors.iter().all(|tensor| tensor.eq(-1.0).all().int64_value(&[]) == 1));
        assert_eq!(storage_id(&tensors[2]), storage_id(&tensors[0]));
        assert_ne!(storage_id(&tensors[1]), storage_id(&tensors[0]));
        assert_eq!(tensors[2].data_ptr() as usize - tensors[0].data_ptr() as usize, ALIGNMENT);
    }

    #[test]
    fn only_those_without_state_begin() {
        let params: Vec<Tensor> = (1..=4).map(|size| Tensor::zeros([size], FLOAT)).collect();
        let mut states = [None, Some(7), None, None];
        let make = |params: &[Tensor]| Ok(params.iter().map(|param| param.size()[0]).collect());
        // The parameter in the first slot is not in this batch.
        begin(&mut states, &[1, 2, 3], &params[1..].iter().collect(), make).unwrap();
        assert_eq!(states, [None, Some(7), Some(3), Some(4)]);
        begin(&mut states, &[0, 2], &[&params[0], &params[2]].into_iter().collect(), make).unwrap();
        assert_eq!(states, [Some(1), Some(7), Some(3), Some(4)]);
    }

    #[test]
    fn steps_go_on_from_where_they_are() {
        let mut states = [3f32, 0.0, 5.0].map(|count| Some(Tensor::from(count)));
        let counts = |states: &[Option<Tensor>]| -> Vec<f64> {
            states.iter().flatten().map(|step| step.double_value(&[])).collect()
        };
        let steps = Steps::of(&mut states, &[0, 2], |step| step).unwrap();
        steps.count().unwrap();
        assert_eq!(counts(&states), [4.0, 0.0, 6.0]);
        // Another batch takes over.
        let steps = Steps::of(&mut states, &[1, 2], |step| step).unwrap();
        steps.count().unwrap();
        assert_eq!(counts(&states), [4.0, 1.0, 7.0]);
        for (is_skipped, wanted) in [(0f32, [4.0, 1.0, 7.0]), (1.0, [4.0, 0.0, 6.0])] {
            steps.take_back(&Tensor::from(is_skipped)).unwrap();
            assert_eq!(counts(&states), wanted);
        }
        assert_eq!(steps.each.get(1).unwrap().double_value(&[]), 6.0);
    }
}
