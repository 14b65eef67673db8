//! Along which axes a run's ranks are laid out.

use super::RunConfig;
use crate::config::ShardingStrategy;
use crate::error::Result;
use crate::error::config::ConfigErrorKind as Kind;
use crate::mesh::{Axis, Mesh};

impl RunConfig {
    /// The mesh of `world_size` ranks, of which `local_world_size` are on each machine.
    ///
    /// `parallelism_config` says the sizes of all axes. Without it, `tensor_parallel_degree` neighbours divide each layer, sharding
    /// plugins say what is sharded over which ranks, and all other ranks are replicas.
    ///
    /// ```
    /// use accelerate_core::config::{ParallelismConfig, PartialRunConfig, RunConfig, Sources};
    /// let mut code = PartialRunConfig::default();
    /// code.parallelism = ParallelismConfig { dp_replicate_size: Some(2), tp_size: Some(4), ..Default::default() };
    /// code.cluster.use_parallelism_config = Some(true);
    /// let run = RunConfig::resolve(Sources { code, ..Default::default() })?;
    /// assert_eq!(run.mesh(8, 8)?.to_string(), "dp_replicate 2 x tp 4");
    /// assert!(run.mesh(6, 6).unwrap_err().to_string().contains("is not a mesh of 6 ranks"));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::is_config`](crate::Error::is_config): sizes that do not multiply to the number of ranks; two sizes of one axis; shards
    /// without a plugin that makes them; two ways to divide sequences; ranks with the same rows with a DeepSpeed configuration.
    pub fn mesh(&self, world_size: usize, local_world_size: usize) -> Result<Mesh> {
        let axes = &self.parallelism;
        let tp_size = match (axes.tp_size, self.tensor_parallel.tensor_parallel_degree) {
            (tp_size, degree) if tp_size > 1 && degree > 1 && tp_size != degree => {
                return Err(Kind::TwoDegrees { tp_size, degree }.into());
            }
            (tp_size, degree) => tp_size.max(degree),
        };
        let sizes = [axes.dp_replicate_size, axes.dp_shard_size, axes.cp_size, axes.sp_size, axes.tp_size];
        let says_axes = sizes.iter().any(|&size| size > 1);
        let with_same_rows = [("cp_size", axes.cp_size), ("sp_size", axes.sp_size), ("tp_size", tp_size)];
        let with_same_rows = with_same_rows.into_iter().find(|(_, size)| *size > 1);
        let sharding = self.fsdp_in_use().filter(|plugin| plugin.sharding_strategy != ShardingStrategy::NoShard);
        if let Some((field, size)) = with_same_rows.filter(|_| self.cluster.use_deepspeed) {
            return Err(Kind::DeepSpeedWithAxis { field, size }.into());
        }
        match sharding {
            None if axes.dp_shard_size > 1 => Err(Kind::ShardsWithoutFsdp { dp_shard_size: axes.dp_shard_size }.into()),
            _ if says_axes => Mesh::of(
                world_size,
                &[
                    (Axis::DpReplicate, axes.dp_replicate_size),
                    (Axis::DpShard, axes.dp_shard_size),
                    (Axis::Cp, axes.cp_size),
                    (Axis::Sp, axes.sp_size),
                    (Axis::Tp, tp_size),
                ],
            ),
            _ if !world_size.is_multiple_of(tp_size) => {
                Err(Kind::IncompleteDegree { world_size, degree: tp_size }.into())
            }
            sharding => {
                let (num_models, on_machine) = (world_size / tp_size, (local_world_size / tp_size).max(1));
                let data = sharding.map_or(Ok(Mesh::replicated(num_models)), |it| it.mesh(num_models, on_machine))?;
                let sizes = [Axis::DpReplicate, Axis::DpShard].map(|axis| (axis, data.size(axis)));
                Mesh::of(world_size, &[sizes[0], sizes[1], (Axis::Tp, tp_size)])
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::config::{ConfigFile, RunConfig, Sources};
    use rstest::rstest;

    fn mesh(text: &str, world_size: usize) -> crate::Result<String> {
        let file = Some(ConfigFile::read(text, "run.yaml".as_ref())?);
        Ok(RunConfig::resolve(Sources { file, ..Default::default() })?.mesh(world_size, 2)?.to_string())
    }

    const TP: &str = "parallelism_config:\n  parallelism_config_tp_size: 2\n";

    #[rstest]
    #[case("", 1, "one rank")]
    #[case("", 4, "dp_replicate 4")]
    #[case(TP, 2, "tp 2")]
    #[case("tensor_parallel_config:\n  tensor_parallel_degree: 2\n", 4, "dp_replicate 2 x tp 2")]
    #[case("use_fsdp: true\n", 4, "dp_shard 4")]
    #[case("use_fsdp: true\ntensor_parallel_config:\n  tensor_parallel_degree: 2\n", 4, "dp_shard 2 x tp 2")]
    #[case(
        "use_fsdp: true\nparallelism_config:\n  parallelism_config_dp_shard_size: 2\n  parallelism_config_dp_replicate_size: 2\n",
        4,
        "dp_replicate 2 x dp_shard 2"
    )]
    #[case(
        "parallelism_config:\n  parallelism_config_cp_size: 2\n  parallelism_config_dp_replicate_size: 2\n",
        4,
        "dp_replicate 2 x cp 2"
    )]
    #[case(
        "use_fsdp: true\nparallelism_config:\n  parallelism_config_dp_shard_size: 2\n  parallelism_config_sp_size: 3\n",
        6,
        "dp_shard 2 x sp 3"
    )]
    fn settings_lay_ranks_out(#[case] text: &str, #[case] world_size: usize, #[case] wanted: &str) {
        assert_eq!(mesh(text, world_size).unwrap(), wanted);
    }

    #[rstest]
    #[case(TP.to_owned(), 4, "tp 2 is not a mesh of 4 ranks")]
    #[case("tensor_parallel_config:\n  tensor_parallel_degree: 2\n".to_owned(), 3, "3 ranks do not fill groups of 2")]
    #[case(format!("{TP}tensor_parallel_config:\n  tensor_parallel_degree: 4\n"), 4, "leave one of them out")]
    #[case(format!("{TP}use_deepspeed: true\n"), 2, "DeepSpeed")]
    #[case("parallelism_config:\n  parallelism_config_dp_shard_size: 2\n".to_owned(), 2, "nothing shards models")]
    #[case("use_deepspeed: true\nparallelism_config:\n  parallelism_config_sp_size: 2\n".to_owned(), 2, "sp_size is 2")]
    #[case("parallelism_config:\n  parallelism_config_cp_size: 2\n  parallelism_config_sp_size: 2\n".to_owned(), 4, "at 1")]
    #[case("parallelism_config:\n  parallelism_config_sp_attn_implementation: eager\n".to_owned(), 1, "\"sdpa\" alone")]
    #[case("parallelism_config:\n  parallelism_config_cp_comm_strategy: ring\n".to_owned(), 1, "\"alltoall\"")]
    #[case("parallelism_config:\n  parallelism_config_sp_seq_length_is_variable: false\n".to_owned(), 1, "how long sequences are")]
    fn what_is_no_mesh_is_refused(#[case] text: String, #[case] world_size: usize, #[case] words: &str) {
        let error = mesh(&text, world_size).unwrap_err();
        assert!(error.is_config() && error.to_string().contains(words), "{error}");
    }
}
