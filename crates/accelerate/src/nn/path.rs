//! Where in the model a parameter is made: the path is the module tree.

use super::init::{self, Init};
use super::param::Role;
use super::{AnyLayer, Param, ParamStore, TrainingFlag};
use crate::error::{NnError, Result};
use std::fmt::Display;
use std::ops::Div;
use tch::{Device, Kind, Tensor};

/// How [`Path::buffer`] keeps a buffer.
///
/// ```
/// assert!(accelerate::nn::BufferOptions::default().persistent);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferOptions {
    /// Is it saved with the model? Default true.
    pub persistent: bool,
}

impl Default for BufferOptions {
    fn default() -> Self {
        Self { persistent: true }
    }
}

/// A place in a [`ParamStore`], under which layers register their parameters.
///
/// `/` descends: `&path / "layer" / 0` names what PyTorch calls `layer.0`.
///
/// ```
/// use accelerate::nn::{Linear, ParamStore};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// let encoder = store.root() / "encoder";
/// for index in 0..2 {
///     Linear::new(&encoder / "layer" / index, 3, 3, Default::default())?;
/// }
/// assert!(store.get("encoder.layer.1.bias").is_some());
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Path {
    store: ParamStore,
    prefix: String,
}

/// A first value: a tensor as it is, or a shape and how to fill it.
///
/// Made by `into()` from a [`Tensor`], from `([3, 4], Init::Zeros)`, or from a slice or vector in place of
/// the array.
#[derive(Debug)]
#[non_exhaustive]
pub enum Initial {
    /// These values, moved to the store's device; the element type stays.
    Tensor(Tensor),
    /// A new tensor of the store's element type.
    Shaped(Vec<i64>, Init),
}

impl From<Tensor> for Initial {
    fn from(tensor: Tensor) -> Self {
        Self::Tensor(tensor)
    }
}

impl<const N: usize> From<([i64; N], Init)> for Initial {
    fn from((shape, init): ([i64; N], Init)) -> Self {
        Self::Shaped(shape.to_vec(), init)
    }
}

impl From<(&[i64], Init)> for Initial {
    fn from((shape, init): (&[i64], Init)) -> Self {
        Self::Shaped(shape.to_vec(), init)
    }
}

impl From<(Vec<i64>, Init)> for Initial {
    fn from((shape, init): (Vec<i64>, Init)) -> Self {
        Self::Shaped(shape, init)
    }
}

impl Path {
    pub(crate) fn root(store: ParamStore) -> Self {
        Self { store, prefix: String::new() }
    }

    /// The name of this place: `encoder.layer.0`, empty at the root.
    pub fn name(&self) -> &str {
        &self.prefix
    }

    /// The store under which this path registers.
    pub fn store(&self) -> &ParamStore {
        &self.store
    }

    /// Where new parameters are put.
    pub fn device(&self) -> Device {
        self.store.device()
    }

    /// The element type of new parameters made from a shape.
    pub fn kind(&self) -> Kind {
        self.store.kind()
    }

    /// The flag that dropout and batch normalisation under this path obey.
    pub fn training_flag(&self) -> TrainingFlag {
        self.store.training_flag()
    }

    /// The place called `name` under this one; the same as `self / name`.
    pub fn sub(&self, name: &str) -> Self {
        Self { store: self.store.clone(), prefix: self.full_name(name) }
    }

    fn full_name(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_owned() } else { format!("{}.{name}", self.prefix) }
    }

    /// Registers a trainable parameter, filled by an [`Init`] or taken from a tensor.
    ///
    /// Random values are drawn from the CPU generator whatever the device, as a PyTorch model gets them
    /// that is built on the CPU and moved by `prepare`: one seed gives one model on every device.
    ///
    /// # Errors
    /// The name is taken or malformed; the tensor has integer elements; libtorch reports that the memory does not
    /// suffice.
    ///
    /// ```
    /// use accelerate::nn::{Init, ParamStore};
    /// use accelerate::tch::{Device, Tensor};
    ///
    /// let path = ParamStore::new(Device::Cpu).root() / "head";
    /// let weight = path.param("weight", ([2, 3], Init::XavierUniform { gain: 1.0 }))?;
    /// let bias = path.param("bias", Tensor::from_slice(&[0.5f32, -0.5]))?;
    /// assert_eq!((weight.shape(), bias.name()), (vec![2, 3], "head.bias"));
    /// assert!(path.param("bias", ([2], Init::Zeros)).is_err());
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn param(&self, name: &str, initial: impl Into<Initial>) -> Result<Param> {
        let name = self.full_name(name);
        // Before the draw, so that an error leaves the random stream as it was.
        self.store.check_free(&name)?;
        let initial = initial.into();
        if let Initial::Shaped(shape, init) = &initial
            && let Some(param) = self.store.insert_deferred(&name, shape, *init)?
        {
            return Ok(param);
        }
        let tensor = self.create(initial)?;
        if !init::is_floating(tensor.f_kind()?) {
            return Err(NnError::IntegerParameter { name, kind: tensor.f_kind()? }.into());
        }
        let tensor = tensor.f_set_requires_grad(true)?;
        self.store.insert(Param::new(name, Role::Parameter, tensor))
    }

    /// Registers state that is not learned (`register_buffer` of PyTorch).
    ///
    /// # Errors
    /// The name is taken or malformed.
    ///
    /// ```
    /// use accelerate::nn::{BufferOptions, ParamStore};
    /// use accelerate::tch::{Device, Kind, Tensor};
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// let positions = Tensor::arange(8, (Kind::Int64, Device::Cpu));
    /// let buffer = store.root().buffer("position_ids", positions, BufferOptions { persistent: false })?;
    /// assert!(buffer.is_buffer() && !buffer.is_persistent());
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn buffer(&self, name: &str, initial: impl Into<Initial>, options: BufferOptions) -> Result<Param> {
        let BufferOptions { persistent } = options;
        let name = self.full_name(name);
        self.store.check_free(&name)?;
        let tensor = self.create(initial.into())?.f_set_requires_grad(false)?;
        self.store.insert(Param::new(name, Role::Buffer { persistent }, tensor))
    }

    /// Gives an existing parameter of the same store a second name: tied weights.
    ///
    /// The parameter is counted, optimised and written once, under its first name; a weight file may hold
    /// it under either.
    ///
    /// # Errors
    /// The name is taken or malformed; the parameter belongs to another store.
    ///
    /// ```
    /// use accelerate::nn::{Embedding, ParamStore};
    /// use accelerate::tch::Device;
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// let words = Embedding::new(store.root() / "words", 10, 4, Default::default())?;
    /// let decoder = (store.root() / "decoder").alias("weight", &words.weight)?;
    /// assert!(decoder.is_same(&words.weight));
    /// assert_eq!(store.aliases()["decoder.weight"], "words.weight");
    /// assert_eq!(store.num_parameters(), 40);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn alias(&self, name: &str, param: &Param) -> Result<Param> {
        self.store.insert_alias(self.full_name(name), param)
    }

    /// Makes a layer known to [`ParamStore::named_layers`].
    pub(super) fn register_layer(&self, layer: AnyLayer) {
        self.store.state().layers.push((self.prefix.clone(), layer));
    }

    fn create(&self, initial: Initial) -> Result<Tensor> {
        let tensor = match initial {
            Initial::Tensor(tensor) => tensor.f_detach()?,
            Initial::Shaped(shape, init) => {
                let tensor = Tensor::f_empty(&shape, (self.store.kind(), Device::Cpu))?;
                init.apply(&tensor)?;
                tensor
            }
        };
        Ok(tensor.f_to(self.store.device())?)
    }
}

/// What a level of a [`Path`] may be called by: a name, or the number of a layer.
pub trait PathName: Display {}

/// One implementation for all names, so that the compiler knows what `path / 0 / "weight"` is without knowing which integer 0 is.
impl<N: PathName> Div<N> for &Path {
    type Output = Path;
    fn div(self, name: N) -> Path {
        self.sub(&name.to_string())
    }
}

impl<N: PathName> Div<N> for Path {
    type Output = Path;
    fn div(self, name: N) -> Path {
        &self / name
    }
}

macro_rules! path_names {
    ($($type:ty),*) => {$( impl PathName for $type {} )*};
}

path_names!(&str, String, &String, i32, i64, u32, u64, usize);
