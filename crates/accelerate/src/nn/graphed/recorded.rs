//! Two recordings, one for each direction, and the tensors at fixed places between which they compute.

use super::Recorder;
use super::passes::{Key, Turns};
use crate::error::Result;
use std::ops::Range;
use tch::{Kind, Tensor};
use torch_ext::autograd::{GradOptions, grad};
use torch_ext::foreach;

/// How often the work is done before it is recorded, as with `torch.cuda.make_graphed_callables`.
const NUM_WARM_UPS: usize = 3;

/// The forward pass of the model: outputs for inputs.
type Forward<'a> = dyn FnMut(&[Tensor]) -> Result<Vec<Tensor>> + 'a;

/// Gradients by parameter; `None` where the outputs do not depend on it.
type Gradients = Vec<Option<Tensor>>;

pub(super) struct Recorded<R: Recorder> {
    pub(super) key: Key,
    pub(super) num_compared: usize,
    recorder: R,
    parameters: Vec<Tensor>,
    inputs: Vec<Tensor>,
    forward: R::Recording,
    /// None where nothing has a gradient.
    backward: Option<R::Recording>,
    /// With the graph of gradients that the backward pass was recorded from.
    outputs: Vec<Tensor>,
    /// Gradients of the outputs that have one.
    of_outputs: Gradients,
    gradients: Flats,
    turns: Turns,
}

/// What one pass of the model itself gives.
pub(super) struct Eager {
    pub(super) outputs: Vec<Tensor>,
    pub(super) gradients: Gradients,
}

impl<R: Recorder> Recorded<R> {
    pub(super) fn new(
        key: Key,
        recorder: R,
        parameters: &[Tensor],
        inputs: &[Tensor],
        model: &mut Forward<'_>,
    ) -> Result<Self> {
        let inputs = inputs.iter().map(copy).collect::<Result<Vec<_>>>()?;
        let mut warm = None;
        recorder.warm_up(&mut || {
            for _ in 0..NUM_WARM_UPS {
                warm = Some(pass(&inputs, parameters, model)?);
            }
            Ok(())
        })?;
        let shapes = warm.take().map(|warm| warm.gradients).unwrap_or_default();
        let gradients = Flats::for_these(&shapes)?;
        drop(shapes);
        let mut outputs = Vec::new();
        let forward = recorder.record(&mut || {
            outputs = model(&inputs)?;
            Ok(())
        })?;
        // Outside of the recordings, whose memory other tensors get in turns.
        let room = |output: &Tensor| output.requires_grad().then(|| output.f_detach()?.f_zeros_like()).transpose();
        let of_outputs = outputs.iter().map(room).collect::<Result<Gradients, _>>()?;
        let has_gradients = gradients.is_any() && of_outputs.iter().any(Option::is_some);
        let mut work = || gradients.write(&differentiate(&outputs, parameters, &of_outputs)?);
        let backward = has_gradients.then(|| recorder.record(&mut work)).transpose()?;
        Ok(Self {
            key,
            num_compared: 0,
            recorder,
            parameters: parameters.iter().map(Tensor::shallow_clone).collect(),
            inputs,
            forward,
            backward,
            outputs,
            of_outputs,
            gradients,
            turns: Turns::default(),
        })
    }

    /// Overwrites the inputs of the recording.
    pub(super) fn put_inputs(&mut self, inputs: &[Tensor]) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for (place, input) in self.inputs.iter_mut().zip(inputs) {
            place.f_copy_(input)?;
        }
        Ok(())
    }

    /// A pass of the model itself for the inputs that are in their places.
    pub(super) fn eager(&self, parameters: &[Tensor], model: &mut Forward<'_>) -> Result<Eager> {
        pass(&self.inputs, parameters, model)
    }

    /// The forward pass; its number is what the backward pass brings along.
    pub(super) fn forward(&mut self, model: &mut Forward<'_>) -> Result<u64> {
        let turn = self.turns.begin();
        let Self { recorder, forward, inputs, outputs, .. } = self;
        recorder.replay(forward, &mut || {
            // The recorded pass was made with gradients, wherever this one is asked for.
            *outputs = tch::with_grad(|| model(inputs))?;
            Ok(())
        })?;
        Ok(turn)
    }

    pub(super) fn copied_outputs(&self) -> Result<Vec<Tensor>> {
        self.outputs.iter().map(copy).collect()
    }

    pub(super) fn are_differentiable(&self) -> impl Iterator<Item = bool> {
        self.of_outputs.iter().map(Option::is_some)
    }

    /// Is this the backward pass whose intermediate results are there?
    pub(super) fn take_turn(&mut self, turn: u64) -> Result<()> {
        self.turns.take(turn)
    }

    /// The backward pass for these gradients of the outputs.
    pub(super) fn backward(&mut self, of_outputs: &[Option<Tensor>]) -> Result<Gradients> {
        let _no_grad = tch::no_grad_guard();
        let Self { recorder, backward, parameters, outputs, of_outputs: places, gradients, .. } = self;
        let Some(backward) = backward else { return Ok(parameters.iter().map(|_| None).collect()) };
        for (place, given) in places.iter_mut().zip(of_outputs) {
            match (place, given) {
                (Some(place), Some(given)) => place.f_copy_(given).map(drop)?,
                (Some(place), None) => foreach::zero_(&[&*place])?,
                (None, _) => {}
            }
        }
        let work = &mut || gradients.write(&differentiate(outputs, parameters, places)?);
        recorder.replay(backward, work)?;
        gradients.copied()
    }

    /// Gradients of outputs to compare with: none like another.
    pub(super) fn probes(&self, outputs: &[Tensor]) -> Result<Gradients> {
        outputs.iter().zip(self.are_differentiable()).map(|(own, has)| has.then(|| probe(own)).transpose()).collect()
    }

    /// Is anything computed with few bits?
    pub(super) fn is_low(&self) -> bool {
        let is_low = |tensor: &Tensor| matches!(tensor.kind(), Kind::Half | Kind::BFloat16);
        self.key.autocast.is_some() || self.parameters.iter().chain(&self.inputs).chain(&self.outputs).any(is_low)
    }
}

/// In memory of its own, and outside of every graph of gradients: a copy alone has a place in it, without a derivative.
pub(super) fn copy(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_detach()?.f_detach_copy()?)
}

fn probe(output: &Tensor) -> Result<Tensor> {
    let count = output.f_detach()?.f_ones_like()?.f_reshape([-1])?.f_cumsum(0, Kind::Float)?;
    Ok(count.f_cos()?.f_to_kind(output.f_kind()?)?.f_reshape(output.size())?)
}

/// Forward and backward by the model.
fn pass(inputs: &[Tensor], parameters: &[Tensor], model: &mut Forward<'_>) -> Result<Eager> {
    let outputs = model(inputs)?;
    let probes = outputs.iter().map(|own| own.requires_grad().then(|| probe(own)).transpose());
    let gradients = differentiate(&outputs, parameters, &probes.collect::<Result<Gradients>>()?)?;
    let outputs = outputs.iter().map(copy).collect::<Result<_>>()?;
    Ok(Eager { outputs, gradients })
}

fn differentiate(outputs: &[Tensor], parameters: &[Tensor], of_outputs: &[Option<Tensor>]) -> Result<Gradients> {
    let pairs = outputs.iter().zip(of_outputs).filter_map(|(output, own)| own.as_ref().map(|own| (output, own)));
    let (outputs, of_outputs): (Vec<&Tensor>, Vec<&Tensor>) = pairs.unzip();
    if outputs.is_empty() || parameters.is_empty() {
        return Ok(parameters.iter().map(|_| None).collect());
    }
    let options = GradOptions { allow_unused: true, ..Default::default() };
    Ok(grad(&outputs, &parameters.iter().collect::<Vec<_>>(), Some(&of_outputs), options)?)
}

/// Gradients in as few pieces of memory as they have element types: one copy hands all of them out.
struct Flats {
    memory: Vec<Tensor>,
    /// By parameter; `None` for one without a gradient.
    places: Vec<Option<Place>>,
}

/// Where a gradient is: in which piece of memory, which elements of it, and in what shape.
struct Place {
    piece: usize,
    range: Range<i64>,
    shape: Vec<i64>,
}

impl Flats {
    fn for_these(gradients: &[Option<Tensor>]) -> Result<Self> {
        let mut sizes: Vec<(Kind, i64)> = Vec::new();
        let mut places = Vec::with_capacity(gradients.len());
        for gradient in gradients {
            let Some(gradient) = gradient else {
                places.push(None);
                continue;
            };
            let kind = gradient.f_kind()?;
            let piece = sizes.iter().position(|(own, _)| *own == kind).unwrap_or_else(|| {
                sizes.push((kind, 0));
                sizes.len() - 1
            });
            let start = sizes[piece].1;
            sizes[piece].1 += gradient.numel() as i64;
            places.push(Some(Place { piece, range: start..sizes[piece].1, shape: gradient.size() }));
        }
        let device = gradients.iter().flatten().next().map_or(tch::Device::Cpu, Tensor::device);
        let memory = sizes.into_iter().map(|(kind, size)| Tensor::f_zeros([size], (kind, device)));
        Ok(Self { memory: memory.collect::<Result<_, _>>()?, places })
    }

    fn is_any(&self) -> bool {
        !self.memory.is_empty()
    }

    /// One operation for each piece.
    fn write(&self, gradients: &[Option<Tensor>]) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for (index, memory) in self.memory.iter().enumerate() {
            let mut parts = Vec::new();
            for (place, gradient) in self.places.iter().zip(gradients) {
                match (place, gradient) {
                    (Some(place), Some(gradient)) if place.piece == index => parts.push(gradient.f_reshape([-1])?),
                    (Some(Place { piece, range, .. }), None) if *piece == index => {
                        parts.push(memory.f_zeros_like()?.f_narrow(0, 0, range.end - range.start)?);
                    }
                    _ => {}
                }
            }
            let _ = Tensor::f_cat_out(memory, &parts, 0)?;
        }
        Ok(())
    }

    /// In memory that the next pass does not write to.
    fn copied(&self) -> Result<Gradients> {
        let copies = self.memory.iter().map(copy).collect::<Result<Vec<_>>>()?;
        let view = |Place { piece, range, shape }: &Place| {
            Ok(copies[*piece].f_narrow(0, range.start, range.end - range.start)?.f_view(shape.as_slice())?)
        };
        self.places.iter().map(|place| place.as_ref().map(view).transpose()).collect()
    }
}
