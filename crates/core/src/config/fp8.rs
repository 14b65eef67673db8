//! Computing in FP8: the settings of both ways to scale, under the names of the libraries whose ways they are.

use crate::names::spelled_enum;
use crate::settings::record::record;

const NO_MSAMP: &str = "MS-AMP is not available, and nobody keeps it any more; choose backend AO or TE";
const NO_PRODUCTS: &str = "a program of this library computes all three products in FP8, and a launch hands on no three values at \
     once; say it in the TERecipeKwargs of a script in Python";

spelled_enum! {
    /// Whose way to compute in FP8 is followed (`FP8BackendType` of the reference, `utils/dataclasses.py`). No library is needed.
    ///
    /// ```
    /// use accelerate_core::config::FP8BackendType;
    /// assert_eq!("ao".parse::<FP8BackendType>()?, FP8BackendType::AO);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    FP8BackendType, "way to compute in FP8" {
        /// torchao's: a scale is made of the tensor that it is for.
        AO = "AO",
        /// TransformerEngine's: a scale is made of the largest values of the steps before.
        TE = "TE",
        /// MS-AMP's, which is refused.
        MSAMP = "MSAMP",
    }
}

spelled_enum! {
    /// The number formats of delayed scaling (`Format` of TransformerEngine's recipes).
    FP8Format, "FP8 format" {
        /// E4M3 in the forward pass, which has more digits, and E5M2 for gradients, which has the larger range.
        Hybrid = "HYBRID",
        /// E4M3 in both passes.
        E4M3 = "E4M3",
        /// E5M2 in both passes, in which nothing can be trained: it is refused.
        E5M2 = "E5M2",
    }
}

spelled_enum! {
    /// Which of the remembered largest values a scale of delayed scaling is made of.
    AmaxComputeAlgorithm, "choice of a largest value" {
        /// That of the last pass.
        MostRecent = "most_recent",
        /// The largest of all that are remembered.
        Max = "max",
    }
}

spelled_enum! {
    /// Which elements of a tensor have a scale together (`Float8LinearRecipeName` of torchao).
    Float8LinearRecipeName, "recipe of torchao" {
        /// All of them. Gradients of outputs are E5M2, all else is E4M3.
        Tensorwise = "tensorwise",
        /// Those of a row, along which a product adds up. All is E4M3, and scales are powers of two.
        Rowwise = "rowwise",
        /// The same, with the gradient of the weight computed in the type of its operands.
        RowwiseWithGwHp = "rowwise_with_gw_hp",
    }
}

record! {
    /// Computing in FP8 (`FP8RecipeKwargs` of the reference, `utils/dataclasses.py`, and what its recipes for
    /// TransformerEngine, torchao and MS-AMP add). It counts where mixed_precision is fp8.
    ///
    /// ```
    /// use accelerate_core::config::{Float8LinearRecipeName, FP8RecipeKwargs, FP8Settings};
    /// use accelerate_core::fp8::Fp8Recipe;
    /// let kwargs = FP8RecipeKwargs { recipe_name: Some(Float8LinearRecipeName::Rowwise), ..Default::default() };
    /// assert!(matches!(Fp8Recipe::of_settings(&FP8Settings::from(kwargs))?, Fp8Recipe::Dynamic(_)));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    FP8RecipeKwargs => FP8Settings, section "fp8_config", keys "fp8_", variables "ACCELERATE_FP8_" {
        /// Whose way to compute is followed: AO, torchao's, or TE, TransformerEngine's. MSAMP is refused.
        ///
        /// Without it: TE where settings of TransformerEngine's recipe are given, and AO otherwise.
        backend: FP8BackendType => setting().flag("fp8_backend").seed_default("TE");
        /// Which elements of a tensor have a scale together, with backend AO: tensorwise, rowwise or rowwise_with_gw_hp.
        recipe_name: Float8LinearRecipeName = Float8LinearRecipeName::Tensorwise => setting().flag("fp8_recipe_name");
        /// Compute what is no product in FP8 in bfloat16 where autocast does so, and not in the type of its operands.
        use_autocast: bool = true => setting();
        /// Compute in FP8 in evaluation, too, with backend TE. With AO layers always do.
        use_autocast_during_eval: bool = false => setting().flag("fp8_use_autocast_during_eval").switch();
        /// Leave so many powers of two between the largest value and the largest number, with backend TE.
        margin: usize = 0 => setting().flag("fp8_margin");
        /// Steps between two computations of a scale, with backend TE.
        interval: usize = 1 => setting().flag("fp8_interval").at_least(1);
        /// The formats of the passes, with backend TE: HYBRID or E4M3.
        fp8_format: FP8Format = FP8Format::Hybrid => setting()
            .keys(&["format", "fp8_format"]).variable("ACCELERATE_FP8_FORMAT").flag("fp8_format");
        /// Number of passes whose largest values are remembered, with backend TE.
        amax_history_len: usize = 1024 => setting()
            .keys(&["amax_history_len", "amax_history_length"]).flag("fp8_amax_history_len").at_least(1);
        /// Which of them counts, with backend TE: most_recent or max.
        amax_compute_algo: AmaxComputeAlgorithm = AmaxComputeAlgorithm::MostRecent => setting()
            .keys(&["amax_compute_algo", "amax_compute_algorithm"]).flag("fp8_amax_compute_algo");
        /// Which of three products are computed in more bits.
        override_linear_precision: String => setting()
            .flag("fp8_override_linear_precision").harmless(&["false", "(False, False, False)"]).refused(NO_PRODUCTS);
        /// The level of MS-AMP.
        opt_level: String = "O2".to_owned() => setting()
            .keys(&["opt_level", "optimization_level"]).flag("fp8_opt_level").refused(NO_MSAMP).for_python();
        /// Gather the weights of sharded layers that compute in FP8 as FP8 values, with backend AO and recipe tensorwise. Otherwise they
        /// are gathered in bfloat16, and become FP8 values afterwards.
        enable_fsdp_float8_all_gather: bool = false => setting()
            .flag("fp8_enable_fsdp_float8_all_gather").reference_default("true");
        /// Pad the dim along which a product on a GPU adds up to a multiple of 16. Without it, a number of rows that 16 does not divide
        /// is an error there.
        pad_inner_dim: bool = true => setting().flag("fp8_pad_inner_dim");
    }
}

impl FP8RecipeKwargs {
    /// Is something said of delayed scaling?
    pub(crate) fn speaks_of_delayed_scaling(&self) -> bool {
        self.margin.is_some()
            || self.interval.is_some()
            || self.fp8_format.is_some()
            || self.amax_history_len.is_some()
            || self.amax_compute_algo.is_some()
            || self.use_autocast_during_eval.is_some()
    }
}

/// Why MS-AMP is refused.
pub(crate) const fn no_msamp() -> &'static str {
    NO_MSAMP
}

/// Delayed scaling as TransformerEngine has it (`TERecipeKwargs` of the reference): [`FP8RecipeKwargs`] with backend TE.
///
/// ```
/// use accelerate_core::config::{AmaxComputeAlgorithm, FP8BackendType, FP8RecipeKwargs, TERecipeKwargs};
/// let recipe = TERecipeKwargs { amax_compute_algo: Some(AmaxComputeAlgorithm::Max), ..Default::default() };
/// assert_eq!(FP8RecipeKwargs::from(recipe).backend, Some(FP8BackendType::TE));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TERecipeKwargs {
    /// [`FP8RecipeKwargs::use_autocast_during_eval`].
    pub use_autocast_during_eval: Option<bool>,
    /// [`FP8RecipeKwargs::margin`].
    pub margin: Option<usize>,
    /// [`FP8RecipeKwargs::interval`].
    pub interval: Option<usize>,
    /// [`FP8RecipeKwargs::fp8_format`].
    pub fp8_format: Option<FP8Format>,
    /// [`FP8RecipeKwargs::amax_history_len`].
    pub amax_history_len: Option<usize>,
    /// [`FP8RecipeKwargs::amax_compute_algo`].
    pub amax_compute_algo: Option<AmaxComputeAlgorithm>,
}

impl From<TERecipeKwargs> for FP8RecipeKwargs {
    fn from(recipe: TERecipeKwargs) -> Self {
        Self {
            backend: Some(FP8BackendType::TE),
            use_autocast_during_eval: recipe.use_autocast_during_eval,
            margin: recipe.margin,
            interval: recipe.interval,
            fp8_format: recipe.fp8_format,
            amax_history_len: recipe.amax_history_len,
            amax_compute_algo: recipe.amax_compute_algo,
            ..Self::default()
        }
    }
}

/// Dynamic scaling as torchao has it (`AORecipeKwargs` of the reference): [`FP8RecipeKwargs`] with backend AO.
///
/// ```
/// use accelerate_core::config::{AORecipeKwargs, FP8BackendType, FP8RecipeKwargs, Float8LinearRecipeName};
/// let recipe = AORecipeKwargs { recipe_name: Some(Float8LinearRecipeName::Rowwise), ..Default::default() };
/// assert_eq!(FP8RecipeKwargs::from(recipe).backend, Some(FP8BackendType::AO));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AORecipeKwargs {
    /// [`FP8RecipeKwargs::recipe_name`]: what `Float8LinearConfig.from_recipe_name` is given in Python.
    pub recipe_name: Option<Float8LinearRecipeName>,
    /// [`FP8RecipeKwargs::pad_inner_dim`].
    pub pad_inner_dim: Option<bool>,
    /// [`FP8RecipeKwargs::enable_fsdp_float8_all_gather`].
    pub enable_fsdp_float8_all_gather: Option<bool>,
}

impl From<AORecipeKwargs> for FP8RecipeKwargs {
    fn from(recipe: AORecipeKwargs) -> Self {
        Self {
            backend: Some(FP8BackendType::AO),
            recipe_name: recipe.recipe_name,
            pad_inner_dim: recipe.pad_inner_dim,
            enable_fsdp_float8_all_gather: recipe.enable_fsdp_float8_all_gather,
            ..Self::default()
        }
    }
}

/// MS-AMP (`MSAMPRecipeKwargs` of the reference): [`FP8RecipeKwargs`] with a backend that is refused by name.
///
/// ```
/// use accelerate_core::config::{FP8BackendType, FP8RecipeKwargs, MSAMPRecipeKwargs};
/// assert_eq!(FP8RecipeKwargs::from(MSAMPRecipeKwargs::default()).backend, Some(FP8BackendType::MSAMP));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MSAMPRecipeKwargs {
    /// [`FP8RecipeKwargs::opt_level`].
    pub opt_level: Option<String>,
}

impl From<MSAMPRecipeKwargs> for FP8RecipeKwargs {
    fn from(recipe: MSAMPRecipeKwargs) -> Self {
        Self { backend: Some(FP8BackendType::MSAMP), opt_level: recipe.opt_level, ..Self::default() }
    }
}
