//! Frozen parameters that a checkpoint leaves out: what it says of them, and whether those of a model are the same.
//!
//! A fingerprint is a sum over elements, each with its place in the full tensor, so ranks add up those of their shards, however
//! the tensor is divided. It tells other weights apart; it does not withstand whoever wants to deceive.

use super::PreparedParameters;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::nn::{Param, ParamStore};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use tch::{Kind, Tensor};
use torch_ext::autograd::version;
use torch_ext::scalar;

/// The key among the values of a model under which these are.
const LEFT_OUT: &str = "left_out";

/// How many elements are looked at in one go.
const CHUNK: usize = 1 << 20;

/// What is known of a tensor that is not in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeftOut {
    pub(crate) shape: Vec<i64>,
    pub(crate) dtype: String,
    pub(crate) fingerprint: i64,
}

/// Tensors that are left out, by name.
pub(crate) type AllLeftOut = BTreeMap<String, LeftOut>;

/// Fingerprints that have been computed: the versions of storage and tensor, and this rank's part.
pub(super) type KnownFingerprints = BTreeMap<String, (u64, i64, i64)>;

/// Says in the values of a model what is left out of it.
pub(crate) fn note_left_out(values: &mut Value, left_out: &AllLeftOut) {
    if left_out.is_empty() {
        return;
    }
    if !values.is_object() {
        *values = json!({});
    }
    values[LEFT_OUT] = json!(left_out);
}

/// What the values of a model in a checkpoint say that is left out.
///
/// # Errors
/// It is not that.
pub(crate) fn left_out_of(values: &Value) -> Result<AllLeftOut, serde_json::Error> {
    values.get(LEFT_OUT).map_or_else(|| Ok(AllLeftOut::new()), |found| serde_json::from_value(found.clone()))
}

/// The names alone, for whoever loads what is there.
pub(super) fn names_left_out(values: &Value) -> BTreeSet<String> {
    let names = values.get(LEFT_OUT).and_then(Value::as_object).into_iter().flat_map(|all| all.keys());
    names.cloned().collect()
}

impl PreparedParameters {
    /// The names of all tensors that frozen parameters are stored as.
    pub(crate) fn frozen_names(&self) -> BTreeSet<String> {
        let frozen = self.store.parameters().into_iter().filter(|param| !param.requires_grad());
        frozen.flat_map(|param| param.stored_as()).map(|param| param.name().to_owned()).collect()
    }

    /// What is to be said of the tensors of these names that the model has. Collective if the model is sharded.
    ///
    /// # Errors
    /// A shard that cannot be read; those of the group.
    pub(crate) fn describe(&self, names: &BTreeSet<String>) -> Result<AllLeftOut> {
        let params: Vec<Param> =
            self.store.persistent().into_iter().filter(|param| names.contains(param.name())).collect();
        let parts = params.iter().map(|param| self.fingerprint(param)).collect::<Result<Vec<i64>>>();
        let sums = summed(&self.store, &params, parts)?;
        let describe = |(param, fingerprint): (&Param, i64)| {
            let dtype = format!("{:?}", param.kind());
            (param.name().to_owned(), LeftOut { shape: param.shape(), dtype, fingerprint })
        };
        Ok(params.iter().zip(sums).map(describe).collect())
    }

    /// This rank's part. Frozen parameters do not change, so it is computed once.
    fn fingerprint(&self, param: &Param) -> Result<i64> {
        let versions = (param.storage_version(), version(&param.local())?);
        if let Some((storage, tensor, known)) = self.known_fingerprints().get(param.name())
            && (*storage, *tensor) == versions
        {
            return Ok(*known);
        }
        let _resident = param.load()?;
        let local = param.stored_values()?.f_contiguous()?.f_reshape([-1])?;
        let mut sum = 0i64;
        let mut at = 0;
        for run in param.layout().runs() {
            for start in run.clone().step_by(CHUNK) {
                let places = start..(start + CHUNK).min(run.end);
                sum = sum.wrapping_add(part(&local.f_narrow(0, at, places.len() as i64)?, &places)?);
                at += places.len() as i64;
            }
        }
        self.known_fingerprints().insert(param.name().to_owned(), (versions.0, versions.1, sum));
        Ok(sum)
    }
}

/// The sum over elements `local`, which are at these places of their tensor.
fn part(local: &Tensor, places: &Range<usize>) -> Result<i64> {
    let _no_grad = tch::no_grad_guard();
    let bits = match local.f_kind()?.elt_size_in_bytes() {
        1 => local.f_view_dtype(Kind::Uint8)?,
        2 => local.f_view_dtype(Kind::Int16)?,
        4 => local.f_view_dtype(Kind::Int)?,
        _ => local.f_view_dtype(Kind::Int64)?,
    };
    let bits = bits.f_to_kind(Kind::Int64)?;
    let options = (Kind::Int64, local.device());
    // 128-bit elements are two of 64.
    let step = bits.numel() / places.len().max(1);
    let first = (places.start * step) as i64;
    let counted = Tensor::f_ones([bits.numel() as i64], options)?.f_cumsum(0, Kind::Int64)?;
    let places = scalar::add(&counted, first - 1)?;
    // Multiplication by odd numbers and shifts, modulo 2^64, as in splitmix64.
    let mixed = scalar::mul(&places, 0x1656_67b1_9e37_79f9_i64)?.f_bitwise_xor_tensor(&bits)?;
    let mixed = scalar::mul(&mixed, -0x40a7_b892_e31b_1a47_i64)?;
    let mixed =
        mixed.f_bitwise_xor_tensor(&mixed.f_bitwise_right_shift(&Tensor::from(31i64).f_to(local.device())?)?)?;
    let mixed = scalar::mul(&mixed, -0x6b2f_b644_ecce_ee15_i64)?;
    Ok(mixed.f_sum(Kind::Int64)?.f_int64_value(&[])?)
}

/// The parts of all ranks that have shards, added up. Fails on all of them where one has no part. Collective there.
fn summed(store: &ParamStore, params: &[Param], parts: Result<Vec<i64>>) -> Result<Vec<i64>> {
    let mut groups: Vec<Group> = Vec::new();
    // Parts of a weight have a group of their own.
    for group in params.iter().chain(&store.parameters()).filter_map(Param::shard_group) {
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    let parts = groups.iter().fold(parts, |parts, group| group.agree_on_success("left_out", parts))?;
    let own = serde_json::to_vec(&parts).map_err(Error::other)?;
    let mut sums = parts;
    for group in &groups {
        for (rank, theirs) in group.all_gather_bytes(&own)?.iter().enumerate() {
            let theirs: Vec<i64> = serde_json::from_slice(theirs).map_err(Error::other)?;
            for ((sum, theirs), param) in sums.iter_mut().zip(theirs).zip(params) {
                if rank != group.rank() && param.shard_group().as_ref() == Some(group) {
                    *sum = sum.wrapping_add(theirs);
                }
            }
        }
    }
    Ok(sums)
}
