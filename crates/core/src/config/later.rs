//! Axes of parallelism and computing in 8 bits: records of which some engines are not there yet. What asks for those is refused.

use crate::settings::record::record;
use serde_json::{Map, Value};

const NO_CP: &str = "context parallelism is not available yet; leave cp_size at 1";
const NO_SP: &str = "sequence parallelism is not available yet; leave sp_size at 1";
const NO_FP8: &str = "computing in 8 bits is not available yet; use mixed_precision bf16";
const NO_FP8_PRODUCTS: &str =
    "a launch hands on no three values at once; say it in the TERecipeKwargs of a script in Python";

record! {
    /// How ranks are laid out along several axes (`ParallelismConfig` of the reference, `parallelism_config.py`). The sizes multiply
    /// to the number of ranks, and the last axis runs fastest: neighbours in number are neighbours along `tp`.
    ///
    /// Two rules of the reference do not hold here: `tp_size` goes with `dp_replicate_size`, and that needs no `dp_shard_size`.
    ParallelismConfig => ParallelismSettings,
    section "parallelism_config", keys "parallelism_config_", variables "PARALLELISM_CONFIG_" {
        /// Number of replicas of the model.
        dp_replicate_size: usize = 1 => setting().flag("parallelism_config_dp_replicate_size").at_least(1);
        /// Number of ranks that shard a replica: with --use_fsdp.
        dp_shard_size: usize = 1 => setting().flag("parallelism_config_dp_shard_size").at_least(1);
        /// Number of ranks that divide each layer (tensor parallelism).
        tp_size: usize = 1 => setting().flag("parallelism_config_tp_size").at_least(1);
        /// Number of ranks that divide each sequence in attention.
        cp_size: usize = 1 => setting().flag("parallelism_config_cp_size").refused(NO_CP).for_python();
        /// Who divides attention.
        cp_backend: String = "torch".to_owned() => setting().flag("parallelism_config_cp_backend").refused(NO_CP).for_python();
        /// How keys and values travel: allgather or alltoall.
        cp_comm_strategy: String = "allgather".to_owned() =>
            setting().flag("parallelism_config_cp_comm_strategy").refused(NO_CP).for_python();
        /// Number of ranks that divide each sequence.
        sp_size: usize = 1 => setting().flag("parallelism_config_sp_size").refused(NO_SP).for_python();
        /// Who divides sequences.
        sp_backend: String = "deepspeed".to_owned() => setting().flag("parallelism_config_sp_backend").refused(NO_SP).for_python();
        /// Length of all sequences.
        sp_seq_length: usize => setting().flag("parallelism_config_sp_seq_length").refused(NO_SP).for_python();
        /// May sequences differ in length?
        sp_seq_length_is_variable: bool = true =>
            setting().flag("parallelism_config_sp_seq_length_is_variable").refused(NO_SP).for_python();
        /// The kernel of attention.
        sp_attn_implementation: String = "sdpa".to_owned() =>
            setting().flag("parallelism_config_sp_attn_implementation").refused(NO_SP).for_python();
    }
}

record! {
    /// Tensor parallelism (`TorchTensorParallelPlugin` of the reference, `utils/dataclasses.py`): several ranks compute each layer
    /// together.
    TorchTensorParallelPlugin => TensorParallelSettings,
    section "tensor_parallel_config", keys "", variables "ACCELERATE_TENSOR_PARALLEL_" {
        /// Number of ranks that divide each layer: what tp_size of parallelism_config is. The other ranks are replicas.
        tensor_parallel_degree: usize = 1 => setting().keys(&["tensor_parallel_degree", "tp_size"]).at_least(1);
        /// How each layer is divided: styles such as colwise and rowwise by patterns of paths. Default: the model's own plan.
        parallelize_plan: Map<String, Value> => setting();
    }
}

record! {
    /// Computing in 8 bits (`FP8RecipeKwargs` of the reference, `utils/dataclasses.py`, and what its recipes for
    /// TransformerEngine, torchao and MS-AMP add). Nothing of it is available; scripts in Python are told of it.
    FP8RecipeKwargs => FP8Settings, section "fp8_config", keys "fp8_", variables "ACCELERATE_FP8_" {
        /// Who computes: TE, AO or MSAMP.
        backend: String => setting().flag("fp8_backend").refused(NO_FP8).for_python().seed_default("TE");
        /// Compute in 8 bits within autocast.
        use_autocast: bool => setting().refused(NO_FP8).seed_default("true");
        /// Compute in 8 bits in evaluation, too.
        use_autocast_during_eval: bool = false =>
            setting().flag("fp8_use_autocast_during_eval").switch().refused(NO_FP8).for_python();
        /// Margin of the scaling factor.
        margin: usize = 0 => setting().flag("fp8_margin").refused(NO_FP8).for_python();
        /// Steps between two scaling factors.
        interval: usize = 1 => setting().flag("fp8_interval").refused(NO_FP8).for_python();
        /// The formats of the passes: HYBRID or E4M3.
        fp8_format: String = "HYBRID".to_owned() => setting()
            .keys(&["format", "fp8_format"]).variable("ACCELERATE_FP8_FORMAT").flag("fp8_format").refused(NO_FP8).for_python();
        /// Steps whose largest values are remembered.
        amax_history_len: usize = 1024 => setting()
            .keys(&["amax_history_len", "amax_history_length"]).flag("fp8_amax_history_len").refused(NO_FP8).for_python();
        /// Which of them counts: most_recent or max.
        amax_compute_algo: String = "most_recent".to_owned() => setting()
            .keys(&["amax_compute_algo", "amax_compute_algorithm"]).flag("fp8_amax_compute_algo").refused(NO_FP8).for_python();
        /// Which of three products are computed in more bits.
        override_linear_precision: String => setting()
            .flag("fp8_override_linear_precision").harmless(&["false", "(False, False, False)"]).refused(NO_FP8_PRODUCTS);
        /// The level of MS-AMP.
        opt_level: String = "O2".to_owned() => setting()
            .keys(&["opt_level", "optimization_level"]).flag("fp8_opt_level").refused(NO_FP8).for_python();
        /// Gather in 8 bits.
        enable_fsdp_float8_all_gather: bool = true =>
            setting().flag("fp8_enable_fsdp_float8_all_gather").refused(NO_FP8).for_python();
        /// Pad dimensions to multiples of 16.
        pad_inner_dim: bool = true => setting().flag("fp8_pad_inner_dim").refused(NO_FP8).for_python();
    }
}
