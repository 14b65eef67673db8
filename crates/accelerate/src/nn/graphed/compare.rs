//! A recorded pass beside the same pass of the model itself.

use super::recorded::{Recorded, copy};
use super::{Recorder, fixed};
use crate::error::Result;
use crate::nn::{Param, ParamStore, is_floating};
use tch::{Kind, Tensor};
use torch_ext::{Generator, foreach};

/// Everything besides inputs that a pass reads or changes.
pub(super) struct Stored {
    /// Those that get gradients.
    pub(super) parameters: Vec<Tensor>,
    trained: Vec<Param>,
    /// Other parameters, and buffers.
    others: Vec<Tensor>,
    kept: Vec<Param>,
    generator: Generator,
}

/// Values that all of it had.
pub(super) struct Values {
    parameters: Vec<Tensor>,
    others: Vec<Tensor>,
    generator: Tensor,
}

pub(super) enum Comparison {
    Same,
    /// Results that are not numbers say nothing, as with float16 before its scale has been found.
    NotFinite,
    Differs {
        what: String,
        by: f64,
        most: f64,
    },
}

impl Stored {
    pub(super) fn of(store: &ParamStore) -> Result<Self> {
        let (trained, frozen): (Vec<_>, Vec<_>) =
            store.parameters().into_iter().partition(|param| param.requires_grad());
        let kept: Vec<_> = frozen.into_iter().chain(store.buffers()).collect();
        Ok(Self {
            parameters: trained.iter().map(fixed).collect::<Result<_>>()?,
            trained,
            others: kept.iter().map(fixed).collect::<Result<_>>()?,
            kept,
            generator: Generator::default_for(store.device())?,
        })
    }

    pub(super) fn everything(&self) -> impl Iterator<Item = &Tensor> {
        self.parameters.iter().chain(&self.others)
    }

    pub(super) fn now(&self) -> Result<Values> {
        let copies = |tensors: &[Tensor]| tensors.iter().map(copy).collect::<Result<_>>();
        Ok(Values {
            parameters: copies(&self.parameters)?,
            others: copies(&self.others)?,
            generator: self.generator.state()?,
        })
    }

    /// To the bit. Graphs of gradients that know the values of before do not notice that there were others in between.
    pub(super) fn put_back(&self, values: &Values) -> Result<()> {
        overwrite(&self.parameters, &values.parameters)?;
        self.put_back_others(values)
    }

    /// What a pass changes: buffers, and how many random numbers were drawn.
    fn put_back_others(&self, values: &Values) -> Result<()> {
        overwrite(&self.others, &values.others)?;
        Ok(self.generator.set_state(&values.generator)?)
    }

    /// With parameters that no step has led to: a recording that kept what it had computed of the old ones is found out, however
    /// small the steps of the optimizer are.
    pub(super) fn with_other_parameters<T>(&self, values: &Values, body: impl FnOnce() -> Result<T>) -> Result<T> {
        // Exact in every type.
        const FACTOR: f64 = 1.125;
        let others: Vec<Tensor> = values.parameters.iter().map(copy).collect::<Result<_>>()?;
        if !others.is_empty() {
            foreach::mul_scalar_(&others.iter().collect::<Vec<_>>(), FACTOR)?;
        }
        overwrite(&self.parameters, &others)?;
        body()
    }
}

/// Writes values past the counters by which graphs of gradients notice changes.
fn overwrite(tensors: &[Tensor], values: &[Tensor]) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    for (tensor, value) in tensors.iter().zip(values) {
        tensor.f_data()?.f_copy_(value)?;
    }
    Ok(())
}

/// One pass of the model and one of the recording, forward and backward, each from the same state.
pub(super) fn both<R: Recorder>(
    recorded: &mut Recorded<R>,
    stored: &Stored,
    before: &Values,
    eager: &mut dyn FnMut(&[Tensor]) -> Result<Vec<Tensor>>,
) -> Result<Comparison> {
    stored.put_back_others(before)?;
    let wanted = recorded.eager(&stored.parameters, eager)?;
    let wanted_others = stored.now()?.others;
    stored.put_back_others(before)?;
    let turn = recorded.forward(eager)?;
    let outputs = recorded.copied_outputs()?;
    recorded.take_turn(turn)?;
    let gradients = recorded.backward(&recorded.probes(&outputs)?)?;
    let found_others = stored.now()?.others;

    let most = if recorded.is_low() { 1e-2 } else { 1e-4 };
    let mut pairs: Vec<(String, &Tensor, &Tensor)> = Vec::new();
    for (index, (found, wanted)) in outputs.iter().zip(&wanted.outputs).enumerate() {
        pairs.push((format!("output {index}"), found, wanted));
    }
    for ((param, found), wanted) in stored.trained.iter().zip(&gradients).zip(&wanted.gradients) {
        let what = format!("the gradient of {}", param.name());
        match (found, wanted) {
            (Some(found), Some(wanted)) => pairs.push((what, found, wanted)),
            (None, None) => {}
            _ => return Ok(Comparison::Differs { what, by: f64::INFINITY, most }),
        }
    }
    for ((param, found), wanted) in stored.kept.iter().zip(&found_others).zip(&wanted_others) {
        pairs.push((param.name().to_owned(), found, wanted));
    }
    for (_, _, wanted) in &pairs {
        if !wanted.f_isfinite()?.f_all()?.f_int64_value(&[]).is_ok_and(|all| all == 1) {
            return Ok(Comparison::NotFinite);
        }
    }
    for (what, found, wanted) in pairs {
        let by = apart(found, wanted)?;
        // A difference that is not a number is none that is small enough.
        if !matches!(by.partial_cmp(&most), Some(std::cmp::Ordering::Less | std::cmp::Ordering::Equal)) {
            return Ok(Comparison::Differs { what, by, most });
        }
    }
    Ok(Comparison::Same)
}

/// The largest difference, as a part of the largest element that is wanted.
fn apart(found: &Tensor, wanted: &Tensor) -> Result<f64> {
    if wanted.numel() == 0 {
        return Ok(0.0);
    }
    if !is_floating(wanted.f_kind()?) {
        return Ok(if found.f_equal(wanted)? { 0.0 } else { f64::INFINITY });
    }
    let (found, wanted) = (found.f_to_kind(Kind::Double)?, wanted.f_to_kind(Kind::Double)?);
    let largest = |tensor: Tensor| tensor.f_abs()?.f_max()?.f_double_value(&[]);
    let (by, scale) = (largest(found.f_sub(&wanted)?)?, largest(wanted)?);
    Ok(if by == 0.0 { 0.0 } else { by / scale.max(f64::MIN_POSITIVE) })
}
