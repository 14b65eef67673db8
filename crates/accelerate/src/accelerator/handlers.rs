//! Settings of single mechanisms, handed to the accelerator as the reference's `kwargs_handlers`.

use crate::profile::ProfileKwargs;
use accelerate_core::config::{
    AORecipeKwargs, AutocastKwargs, DistributedDataParallelKwargs, FP8RecipeKwargs, GradScalerKwargs,
    InitProcessGroupKwargs, MSAMPRecipeKwargs, TERecipeKwargs,
};

/// One group of settings; anything it can be made from goes to `AcceleratorBuilder::kwargs_handler`.
///
/// ```
/// use accelerate::{Accelerator, DistributedDataParallelKwargs};
///
/// let ddp = DistributedDataParallelKwargs { find_unused_parameters: Some(true), ..Default::default() };
/// let accelerator = Accelerator::builder().cpu(true).kwargs_handler(ddp).build()?;
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum KwargsHandler {
    /// How gradients are averaged over ranks.
    DistributedDataParallel(DistributedDataParallelKwargs),
    /// Loss scaling of fp16.
    GradScaler(GradScalerKwargs),
    /// How processes meet, and how long they wait for each other.
    InitProcessGroup(InitProcessGroupKwargs),
    /// Autocast around forward passes.
    Autocast(AutocastKwargs),
    /// What [`Accelerator::profile`](crate::Accelerator::profile) records.
    Profile(ProfileKwargs),
    /// Computing in FP8, with [`MixedPrecision::Fp8`](crate::MixedPrecision::Fp8): also made of an `AORecipeKwargs` or a
    /// `TERecipeKwargs`.
    FP8Recipe(FP8RecipeKwargs),
}

macro_rules! from {
    ($($variant:ident($type:ty)),* $(,)?) => {$(
        impl From<$type> for KwargsHandler {
            fn from(kwargs: $type) -> Self {
                Self::$variant(kwargs)
            }
        }
    )*};
}

from! {
    DistributedDataParallel(DistributedDataParallelKwargs),
    GradScaler(GradScalerKwargs),
    InitProcessGroup(InitProcessGroupKwargs),
    Autocast(AutocastKwargs),
    Profile(ProfileKwargs),
    FP8Recipe(FP8RecipeKwargs),
}

macro_rules! from_recipe {
    ($($type:ty),* $(,)?) => {$(
        impl From<$type> for KwargsHandler {
            fn from(kwargs: $type) -> Self {
                Self::FP8Recipe(kwargs.into())
            }
        }
    )*};
}

from_recipe! { AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs }
