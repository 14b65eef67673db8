//! Axes of parallelism.

use crate::error::Result;
use crate::error::config::ConfigErrorKind as Kind;
use crate::names::spelled_enum;
use crate::settings::record::record;
use serde_json::{Map, Value};

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
        /// Number of ranks that divide each sequence, and exchange keys and values (context parallelism). With cp_size, sp_size is 1.
        cp_size: usize = 1 => setting().flag("parallelism_config_cp_size").at_least(1);
        /// Who divides attention: torch, which stands for the ring attention of this library.
        cp_backend: String = "torch".to_owned() => setting().flag("parallelism_config_cp_backend");
        /// How keys and values travel: allgather (all at once) or alltoall (from neighbour to neighbour, in less memory).
        cp_comm_strategy: String = "allgather".to_owned() => setting().flag("parallelism_config_cp_comm_strategy");
        /// Number of ranks that divide each sequence, and exchange heads of attention (sequence parallelism). With sp_size, cp_size is 1.
        sp_size: usize = 1 => setting().flag("parallelism_config_sp_size").at_least(1);
        /// Who divides sequences: deepspeed, which stands for DeepSpeed's method (Ulysses) and needs no configuration of DeepSpeed.
        sp_backend: String = "deepspeed".to_owned() => setting().flag("parallelism_config_sp_backend");
        /// Length of all sequences, where sp_seq_length_is_variable is false.
        sp_seq_length: usize => setting().flag("parallelism_config_sp_seq_length").at_least(1);
        /// May sequences differ in length?
        sp_seq_length_is_variable: bool = true => setting().flag("parallelism_config_sp_seq_length_is_variable");
        /// The kernel of attention: sdpa, libtorch's scaled_dot_product_attention.
        sp_attn_implementation: String = "sdpa".to_owned() => setting().flag("parallelism_config_sp_attn_implementation");
    }
}

impl ParallelismSettings {
    /// How keys and values travel.
    ///
    /// # Errors
    /// [`Error::is_config`](crate::Error::is_config): a strategy that there is not.
    pub fn cp_comm_strategy(&self) -> Result<ContextParallelStrategy> {
        self.cp_comm_strategy.parse()
    }

    /// How long all sequences are, where they may not differ.
    pub fn fixed_sequence_length(&self) -> Option<usize> {
        self.sp_seq_length.filter(|_| !self.sp_seq_length_is_variable)
    }

    /// Scripts in Python may say other words.
    pub(super) fn check(&self) -> Result<()> {
        self.cp_comm_strategy()?;
        let words = [
            ("cp_backend", &self.cp_backend, "torch"),
            ("sp_backend", &self.sp_backend, "deepspeed"),
            ("sp_attn_implementation", &self.sp_attn_implementation, "sdpa"),
        ];
        for (field, found, wanted) in words {
            if found != wanted {
                return Err(Kind::OneWord { field, found: found.clone(), wanted }.into());
            }
        }
        if !self.sp_seq_length_is_variable && self.sp_seq_length.is_none() {
            return Err(Kind::NoSequenceLength.into());
        }
        Ok(())
    }
}

spelled_enum! {
    /// How keys and values travel along `cp` (`cp_comm_strategy` of the reference, the rotation method of torch's context parallelism).
    ///
    /// ```
    /// use accelerate_core::config::ContextParallelStrategy;
    /// assert_eq!("alltoall".parse::<ContextParallelStrategy>()?, ContextParallelStrategy::AllToAll);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    ContextParallelStrategy, "cp_comm_strategy" {
        /// Every rank gets the keys and values of all others at once.
        AllGather = "allgather",
        /// They go from rank to rank in a ring, so that a rank has those of one other at a time.
        AllToAll = "alltoall",
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
        /// Divide the tokens between divided layers, too (sequence parallelism of Megatron): norms and dropouts keep less for the
        /// backward pass. By the rules of the plan, or by the model's own.
        sequence_parallelism: bool = false => setting();
    }
}
