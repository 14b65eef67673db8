//! A weight of four bits: blocks of codes, their scales, and the scales of those.

use super::{bias_gradient, computed_in, dtype_of, kind_of};
use crate::error::{NnError, Result, WeightsError};
use crate::nn::{DenseKernel, Init, Layout, LinearKernel, Param, Role, Storage};
use accelerate_core::config::{QuantStorage, QuantType};
use accelerate_core::quantization::{
    FourBitNames, FourBitParts, NESTED_BLOCK_SIZE, NestedState, QuantState, dynamic_map, four_bit_values,
};
use std::sync::{Arc, Mutex, PoisonError};
use tch::{Device, Kind, Tensor};
use torch_ext::autograd::{is_grad_enabled, version};
use torch_ext::quantization::{self as codes, Blocks4bit, FourBitCode};
use torch_ext::{apply_function, scalar};

/// How a weight is quantised.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FourBitOptions {
    pub(crate) quant_type: QuantType,
    pub(crate) double_quant: bool,
    pub(crate) block_size: usize,
    pub(crate) storage: QuantStorage,
}

/// The tensors of a weight of four bits, in the order of [`FourBitNames::all`] behind the codes.
#[derive(Debug)]
pub(crate) struct FourBitTensors {
    pub(crate) packed: Tensor,
    pub(crate) absmax: Tensor,
    pub(crate) quant_map: Tensor,
    pub(crate) nested: Option<[Tensor; 2]>,
    /// Bytes.
    pub(crate) quant_state: Tensor,
}

/// The storage of a weight of four bits.
pub(super) struct FourBitWeight {
    name: String,
    options: FourBitOptions,
    state: QuantState,
    /// Codes, scales, table, what is nested, state.
    parts: Vec<Param>,
}

impl FourBitWeight {
    pub(super) fn quantize(name: &str, full: &Tensor, options: FourBitOptions) -> Result<Self> {
        let (state, tensors) = quantize(name, full, options)?;
        Ok(Self::new(name, options, state, tensors))
    }

    /// Of tensors out of a file, which are compared with what they say of themselves and with the shape that the model has.
    pub(super) fn from_file(name: &str, shape: &[i64], quant_type: QuantType, tensors: FourBitTensors) -> Result<Self> {
        let refused = |source| WeightsError::Quantized { source };
        let json = bytes_of(&tensors.quant_state)?;
        let state = QuantState::from_json(name, quant_type, &json).map_err(refused)?;
        let numbers = |tensor: &Tensor| -> Result<Vec<f32>> {
            Ok(Vec::try_from(tensor.f_to(Device::Cpu)?.f_to_kind(Kind::Float)?.f_reshape([-1])?)?)
        };
        let (quant_map, nested_map) =
            (numbers(&tensors.quant_map)?, tensors.nested.as_ref().map(|[_, map]| numbers(map)).transpose()?);
        let absmax_dtype = match tensors.absmax.f_kind()? {
            Kind::Uint8 => "uint8".to_owned(),
            Kind::Float => "float32".to_owned(),
            other => format!("{other:?}"),
        };
        let kind = tensors.packed.f_kind()?;
        let parts = FourBitParts {
            packed_bytes: tensors.packed.numel() * kind.elt_size_in_bytes(),
            absmax: (tensors.absmax.numel(), &absmax_dtype),
            quant_map: &quant_map,
            nested: tensors.nested.as_ref().map(|[absmax, _]| absmax.numel()).zip(nested_map.as_deref()),
        };
        state.check(name, shape, &parts).map_err(refused)?;
        let storage = storage_of(kind).ok_or_else(|| NnError::QuantStorage { parameter: name.to_owned(), kind })?;
        let (double_quant, block_size) = (state.nested.is_some(), state.block_size);
        Ok(Self::new(name, FourBitOptions { quant_type, double_quant, block_size, storage }, state, tensors))
    }

    fn new(name: &str, options: FourBitOptions, state: QuantState, tensors: FourBitTensors) -> Self {
        let names = FourBitNames::of(name, options.quant_type, tensors.nested.is_some());
        let FourBitTensors { packed, absmax, quant_map, nested, quant_state } = tensors;
        let values = [packed, absmax, quant_map].into_iter().chain(nested.into_iter().flatten()).chain([quant_state]);
        let role = Role::Buffer { persistent: true };
        let part = |(name, tensor): (&str, Tensor)| Param::new(name.to_owned(), role, tensor);
        let parts = std::iter::once(name).chain(names.all()).zip(values).map(part).collect();
        Self { name: name.to_owned(), options, state, parts }
    }

    /// The kernel of a layer with this weight.
    pub(super) fn kernel(&self, compute_dtype: Option<Kind>) -> Linear4bit {
        Linear4bit { reader: Arc::new(Reader::new(&self.name, &self.state)), compute_dtype }
    }
}

impl Storage for FourBitWeight {
    fn materialize(&self) -> Result<Tensor> {
        let reader = Reader::new(&self.name, &self.state);
        reader.numbers(&self.parts, kind_of(self.state.dtype))
    }

    fn local(&self) -> Tensor {
        self.parts[0].local()
    }

    fn layout(&self) -> Layout {
        Layout::full(self.state.shape.iter().map(|&size| size.max(0) as usize).collect::<Vec<_>>())
    }

    fn stored_as(&self) -> Option<Vec<Param>> {
        Some(self.parts.clone())
    }

    fn piece_sizes(&self) -> Vec<usize> {
        // Scales are divided with their blocks, and what is small is whole everywhere.
        let block_bytes = self.options.block_size / 2;
        vec![block_bytes / self.options.storage.element_bytes(), 1]
    }

    fn full_tensor(&self) -> Result<Tensor> {
        self.materialize()
    }

    fn overwrite(&self, full: &Tensor) -> Result<()> {
        let full = full.f_expand(&self.state.shape, false)?.f_to_kind(kind_of(self.state.dtype))?;
        let other = Self::quantize(&self.name, &full, self.options)?;
        for (part, other) in self.parts.iter().zip(&other.parts) {
            // The length of the state depends on its digits.
            match part.shape() == other.shape() {
                true => part.copy_(&other.local())?,
                false => part.set_replicated(other.local().f_to(part.local().device())?)?,
            }
        }
        Ok(())
    }

    fn overwrite_shard(&self, shard: &Tensor) -> Result<()> {
        self.overwrite(&shard.f_reshape(&self.state.shape)?)
    }

    fn initialise(&self, _row: Option<i64>, _init: Init) -> Result<()> {
        Err(NnError::QuantizedInitialisation { parameter: self.name.clone() }.into())
    }

    fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        match requires_grad {
            true => Err(NnError::QuantizedRequiresGrad { parameter: self.name.clone() }.into()),
            false => Ok(()),
        }
    }
}

/// `x W^T + b` with a weight of four bits. The gradient reaches the input and the bias.
pub(super) struct Linear4bit {
    /// Backward passes have it as well.
    reader: Arc<Reader>,
    compute_dtype: Option<Kind>,
}

impl std::fmt::Debug for Linear4bit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { reader, compute_dtype } = self;
        f.debug_struct("Linear4bit").field("state", &reader.state).field("compute_dtype", compute_dtype).finish()
    }
}

impl LinearKernel for Linear4bit {
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Tensor> {
        if !weight.is_stored_as_several() {
            return DenseKernel.linear(input, weight, bias);
        }
        let [kind, result] = computed_in(input, self.compute_dtype)?;
        let bias = bias.map(Param::get).transpose()?;
        let x = input.f_to_kind(kind)?;
        let product = || self.reader.product(&weight.stored_as(), &x, bias.as_ref());
        let is_recorded = is_grad_enabled() && (x.requires_grad() || bias.as_ref().is_some_and(Tensor::requires_grad));
        if !is_recorded {
            return Ok(tch::no_grad(product)?.f_to_kind(result)?);
        }
        let inputs: Vec<&Tensor> = std::iter::once(&x).chain(&bias).collect();
        // The numbers are made once more for the gradient: kept, they would take the room that codes save.
        let (weight, reader) = (weight.clone(), Arc::clone(&self.reader));
        let saved_bias = bias.as_ref().map(|bias| bias.f_detach()).transpose()?;
        let needs_x = x.requires_grad();
        let output = apply_function(
            "Linear4bit",
            &inputs,
            |_| Ok(vec![product()?]),
            move |_, gradients| {
                let mut results: Vec<Option<Tensor>> = saved_bias.iter().map(|_| None).chain([None]).collect();
                let Some(Some(gradient)) = gradients.first() else { return Ok(results) };
                if needs_x {
                    let numbers = reader.numbers(&weight.stored_as(), gradient.f_kind()?)?;
                    results[0] = Some(gradient.f_matmul(&numbers)?);
                }
                if let Some(bias) = &saved_bias {
                    results[1] = Some(bias_gradient(gradient, bias)?);
                }
                Ok(results)
            },
        )?
        .swap_remove(0);
        Ok(output.f_to_kind(result)?)
    }
}

/// Reads the parts of a weight of four bits.
struct Reader {
    name: String,
    state: QuantState,
    code: FourBitCode,
    last: Mutex<LastState>,
}

/// What the state said when it was last looked at.
#[derive(Default)]
struct LastState {
    /// Where it was on a device, and how often it had been written to: nobody waits for a device to find it unchanged.
    seen: Option<(usize, i64)>,
    /// The same memory, so that nothing else can be where it was.
    _kept: Option<Tensor>,
    json: Vec<u8>,
    /// The mean of the scales.
    offset: f32,
}

impl Reader {
    fn new(name: &str, state: &QuantState) -> Self {
        let code = FourBitCode::new(four_bit_values(state.quant_type));
        Self { name: name.to_owned(), state: state.clone(), code, last: Mutex::default() }
    }

    /// The mean of the scales. Whoever has overwritten the state may not have changed anything else in it.
    fn offset(&self, quant_state: &Param) -> Result<f32> {
        let bytes = quant_state.local();
        let seen = match bytes.device() {
            Device::Cpu => None,
            _ => Some((bytes.data_ptr() as usize, version(&bytes)?)),
        };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.is_some() && last.seen == seen {
            return Ok(last.offset);
        }
        let json = bytes_of(&bytes)?;
        if last.json != json {
            let refused = |source| WeightsError::Quantized { source };
            let read = QuantState::from_json(&self.name, self.state.quant_type, &json).map_err(refused)?;
            let offset = read.nested.map_or(0.0, |nested| nested.offset);
            let nested = self.state.nested.map(|nested| NestedState { offset, ..nested });
            if read != (QuantState { nested, ..self.state.clone() }) {
                let (parameter, found, wanted) = (self.name.clone(), read.to_json(), self.state.to_json());
                return Err(NnError::OtherQuantState { parameter, found, wanted }.into());
            }
            *last = LastState { json, offset, ..LastState::default() };
        }
        last._kept = seen.is_some().then(|| bytes.f_detach()).transpose()?;
        last.seen = seen;
        Ok(last.offset)
    }

    /// Codes as bytes, and scales.
    fn blocks(&self, parts: &[Param]) -> Result<[Tensor; 2]> {
        let ([packed, absmax, ..], Some(quant_state)) = (parts, parts.last()) else {
            return Err(NnError::NotQuantized { parameter: self.name.clone() }.into());
        };
        let packed = packed.get()?;
        let packed = match packed.f_kind()? {
            Kind::Uint8 => packed,
            _ => packed.f_view_dtype(Kind::Uint8)?,
        };
        let offset = self.offset(quant_state)?;
        let absmax = match parts {
            [_, absmax, _, nested_absmax, nested_map, _] => {
                let (scales, map) = (nested_absmax.get()?, nested_map.get()?);
                codes::dequantize_blockwise(&absmax.get()?, &scales, &map, NESTED_BLOCK_SIZE as i64, offset)?
            }
            _ => absmax.get()?,
        };
        Ok([packed, absmax])
    }

    fn with_blocks<R>(&self, parts: &[Param], run: impl FnOnce(Blocks4bit<'_>) -> Result<R>) -> Result<R> {
        let [packed, absmax] = self.blocks(parts)?;
        let block_size = self.state.block_size as i64;
        run(Blocks4bit { packed: &packed, absmax: &absmax, block_size, code: &self.code })
    }

    fn numbers(&self, parts: &[Param], kind: Kind) -> Result<Tensor> {
        let shape = &self.state.shape;
        let made = match kind {
            Kind::Float | Kind::BFloat16 | Kind::Half => kind,
            _ => Kind::Float,
        };
        let numbers = self.with_blocks(parts, |blocks| Ok(codes::dequantize_4bit(blocks, shape, made)?))?;
        Ok(numbers.f_to_kind(kind)?)
    }

    fn product(&self, parts: &[Param], input: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let [rows, columns] = self.state.shape[..] else {
            return Err(NnError::NotQuantized { parameter: self.name.clone() }.into());
        };
        let is_fit = matches!(input.f_kind()?, Kind::Float | Kind::BFloat16 | Kind::Half)
            && input.size().last() == Some(&columns);
        if !is_fit {
            let (name, wanted) = (self.name.clone(), format!("[.., {columns}] of float32, bfloat16 or float16"));
            let (found, kind) = (input.size(), input.f_kind().ok());
            return Err(NnError::QuantizedForward { name, wanted, found, kind }.into());
        }
        self.with_blocks(parts, |blocks| Ok(codes::linear_4bit(input, blocks, [rows, columns], bias)?))
    }
}

fn quantize(name: &str, full: &Tensor, options: FourBitOptions) -> Result<(QuantState, FourBitTensors)> {
    let _no_grad = tch::no_grad_guard();
    let (device, dtype) = (full.device(), dtype_of(full.f_kind()?));
    let numbers = full.f_detach()?.f_to_kind(kind_of(dtype))?;
    let values = four_bit_values(options.quant_type);
    let (packed, absmax) = codes::quantize_4bit(&numbers, &FourBitCode::new(values), options.block_size as i64)?;
    let packed = match kind_of_storage(options.storage) {
        Kind::Uint8 => packed,
        kind if packed.numel() % kind.elt_size_in_bytes() == 0 => {
            packed.f_reshape([-1])?.f_view_dtype(kind)?.f_unsqueeze(1)?
        }
        kind => return Err(NnError::QuantStorage { parameter: name.to_owned(), kind }.into()),
    };
    let mut nested_state = None;
    let (absmax, nested) = if options.double_quant {
        // The mean of the scales is a part of all of them.
        if absmax.f_isfinite()?.f_all()?.f_int64_value(&[])? == 0 {
            return Err(NnError::NotFiniteWeight { parameter: name.to_owned() }.into());
        }
        let offset = absmax.f_mean(Kind::Float)?.f_double_value(&[])?;
        let map = Tensor::f_from_slice(&dynamic_map())?.f_to(device)?;
        let centred = scalar::add(&absmax, -offset)?;
        let (absmax, nested_absmax) = codes::quantize_blockwise(&centred, &map, NESTED_BLOCK_SIZE as i64)?;
        nested_state = Some(NestedState { block_size: NESTED_BLOCK_SIZE, offset: offset as f32 });
        (absmax, Some([nested_absmax, map]))
    } else {
        (absmax, None)
    };
    let FourBitOptions { quant_type, block_size, .. } = options;
    let state = QuantState { quant_type, block_size, dtype, shape: full.size(), nested: nested_state };
    let quant_map = Tensor::f_from_slice(&values)?.f_to(device)?;
    let quant_state = Tensor::f_from_slice(state.to_json().as_bytes())?.f_to(device)?;
    Ok((state, FourBitTensors { packed, absmax, quant_map, nested, quant_state }))
}

fn bytes_of(tensor: &Tensor) -> Result<Vec<u8>> {
    Ok(Vec::try_from(tensor.f_to(Device::Cpu)?.f_to_kind(Kind::Uint8)?.f_reshape([-1])?)?)
}

fn kind_of_storage(storage: QuantStorage) -> Kind {
    match storage {
        QuantStorage::Uint8 => Kind::Uint8,
        QuantStorage::Float16 => Kind::Half,
        QuantStorage::BFloat16 => Kind::BFloat16,
        QuantStorage::Float32 => Kind::Float,
    }
}

fn storage_of(kind: Kind) -> Option<QuantStorage> {
    QuantStorage::ALL.iter().copied().find(|storage| kind_of_storage(*storage) == kind)
}
