//! All checks, by theme, in the order in which they run: what others stand on comes first.

mod async_saves;
mod attention;
mod big_model;
mod checkpoints;
mod collectives;
mod combinations;
mod devices;
mod divided;
mod exported;
mod graphs;
mod loaders;
mod local_sgd;
mod memory;
mod offload;
mod optimizers;
mod parity;
mod precision;
mod profile;
mod quant_kernels;
mod quantized;
mod races;
mod random;
mod ranks;
mod script_module;
mod sharding;
mod streams;

use accelerate::{Workers, workers};

use crate::check::Check;

pub(crate) const ALL: &[Check] = &[
    Check::new(
        "device_choice",
        "accelerators take the device that settings name; unknown ones are refused",
        devices::choice,
    ),
    Check::new(
        "visible_devices",
        "CUDA_VISIBLE_DEVICES hides devices, and numbers those that it leaves from 0",
        devices::visible,
    ),
    Check::new(
        "collectives",
        "every collective of a group of one, on every dtype of the backend",
        collectives::every_one,
    ),
    Check::new(
        "absent_rank",
        "a group whose other rank never comes is given up at its deadline",
        collectives::absent_rank,
    ),
    Check::new(
        "abort",
        "a group that is dropped in the middle of its work ends, and another takes its place",
        collectives::abort,
    ),
    Check::new(
        "two_ranks",
        "two processes on one device: collectives, and an error that names who is missing",
        ranks::two_ranks,
    )
    .within(120),
    Check::new(
        "float32_tf32",
        "float32 products are exact, and in TF32 once that is asked for",
        precision::float32_tf32,
    ),
    Check::new("autocast", "the dtypes of 16 operators' results under autocast", precision::autocast),
    Check::new("bf16", "training in bfloat16 beside float32", precision::bf16),
    Check::new("fp8", "training in FP8 by each recipe, beside the same numbers on the CPU", precision::fp8).within(120),
    Check::new("fp8_kernels", "kernels for FP8 matrices beside the CPU", quant_kernels::fp8_beside_the_cpu),
    Check::new("fp8_speed", "a layer's training in FP8 beside bfloat16", precision::fp8_speed),
    Check::new(
        "fp16_scaler",
        "infinite gradients skip a step and halve the scale, which grows again",
        precision::fp16_scaler,
    ),
    Check::new("generators", "the same seed gives the same numbers, and a saved state goes on", random::generators),
    Check::new("dropout", "dropout keeps its share, scales it, and repeats with its seed", random::dropout),
    Check::new("loader", "batches arrive whole where copies from pinned memory are not waited for", loaders::pinned),
    Check::new("clipping", "norms and clipped gradients beside plain sums", optimizers::clipping),
    Check::new("optimizers", "fused and foreach optimizers beside the same rules written out", optimizers::rules),
    Check::new("every_optimizer", "each optimizer's training beside the same on the CPU", optimizers::beside_the_cpu),
    Check::new("ddp_hooks", "two processes with each communication hook beside one process", ranks::ddp_hooks)
        .within(120),
    Check::new("fsdp_one", "a model sharded over one rank trains as a plain one", sharding::one),
    Check::new("fsdp_two", "and one sharded over two processes", ranks::fsdp_two).within(120),
    Check::new("four_ranks", "the same as `every_gpu` by four processes over Gloo on one device", ranks::four_ranks)
        .within(120),
    Check::new("local_sgd", "two processes that average their parameters now and then", local_sgd::beside_the_cpu)
        .within(60),
    Check::new("offload", "training with parameters and state in the host's memory or in files", offload::no_bit),
    Check::new(
        "streams",
        "training, offload and batches on other streams than the default one",
        streams::other_than_the_default,
    ),
    Check::new("cuda_graphs", "passes that are recorded and replayed, beside the model itself", graphs::replayed),
    Check::new(
        "save_state",
        "a run that goes on from a checkpoint is the run that was not disturbed",
        checkpoints::state,
    ),
    Check::new(
        "save_state_async",
        "a save in the background has what the device had computed when it was asked for, and nothing later",
        async_saves::pinned,
    ),
    Check::new(
        "combinations",
        "engine, precision, accumulation, clipping, resumption and more as they are drawn, beside the plain engine",
        combinations::drawn,
    )
    .within(120),
    Check::new("save_model", "weights that are saved and loaded are the same", checkpoints::model),
    Check::new("batch_size_search", "find_executable_batch_size after a real lack of memory", memory::batch_size),
    Check::new("memory", "figures of memory, and what empty_cache gives back", memory::figures),
    Check::new("steady_memory", "a training holds as much after many steps as after few", memory::steady),
    Check::new("plan", "the peak of a training step beside the plan of its model", memory::plan),
    Check::new("big_model", "layers in the host's memory and on the disk change no bit", big_model::dispatched),
    Check::new(
        "quant_kernels",
        "kernels for weights of few bits beside those of the CPU",
        quant_kernels::beside_the_cpu,
    ),
    Check::new(
        "quantized",
        "weights of 4 and 8 bits and adapters beside the same on the CPU",
        quantized::beside_the_cpu,
    )
    .within(120),
    Check::new("quantized_speed", "products with weights of 4 and 8 bits beside bfloat16", quantized::speed),
    Check::new("attention", "attention from parts of the keys, beside the CPU", attention::beside_the_cpu),
    Check::new("divided", "two processes that divide layers or sequences beside one process", divided::by_two)
        .within(180),
    Check::new("pipelined", "chunks of texts that go through the layers of two processes", divided::pipelined_by_two)
        .within(60),
    Check::new("generation", "texts of language models beside the CPU", divided::generated),
    Check::new("profiler", "a trace has the operators, and the kernels that they launched", profile::trace),
    Check::new("script_module", "a TorchScript model of Python trains here", script_module::trains).within(120),
    Check::new(
        "every_gpu",
        "a process on each GPU over NCCL: collectives, who is missing, DDP, FSDP",
        ranks::every_gpu,
    )
    .within(120),
    Check::new("shared_gpu", "two processes that NCCL is to connect on one GPU", ranks::shared_gpu),
    Check::new("python_random", "random numbers and dropout beside Python, to the bit", parity::random).within(120),
    Check::new("python_fp32", "losses beside Python Accelerate, float32", parity::float32).within(120),
    Check::new("python_bf16", "losses beside Python Accelerate, bfloat16", parity::bfloat16).within(120),
    Check::new("python_fp16", "losses beside Python Accelerate, float16 with its scaler", parity::float16).within(120),
    Check::new("race_small", "the step of a small model, batch 1, beside Python Accelerate", races::small).within(60),
    Check::new("race_graphs", "the step of a small model, batch 1, by CUDA graphs on both sides", races::small_graphs)
        .within(90),
    Check::new("race_bert_8", "the step of BERT-base, 8 x 128 tokens, bfloat16", races::bert_8).within(60),
    Check::new("race_bert_64", "the step of BERT-base, 64 x 128 tokens, bfloat16", races::bert_64).within(60),
    Check::new("race_gpt2", "the step of GPT-2 124 M, 8 x 1024 tokens, bfloat16", races::gpt2).within(90),
    Check::new("race_optimizer", "AdamW's step on 148 small tensors", races::optimizer).within(60),
    Check::new("race_loader", "a pass over rows in the host's memory, to the device", races::loader).within(60),
    // Last, because Python's compilers may take more of the time than all that is before.
    Check::new("exported", "packages of AOTInductor, for training and for inference, beside Python", exported::trains)
        .within(180),
];

pub(crate) fn find(name: &str) -> Option<&'static Check> {
    ALL.iter().find(|check| check.name == name)
}

/// What processes that a check launches can run.
pub(crate) fn workers() -> Workers {
    workers![
        ranks::collectives_rank,
        ranks::absent_in_the_middle,
        ranks::trained_rank,
        divided::divided_rank,
        divided::pipelined_rank,
        local_sgd::local_rank,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_short_enough_for_the_table() {
        let names: BTreeSet<&str> = ALL.iter().map(|check| check.name).collect();
        assert_eq!(names.len(), ALL.len());
        assert!(names.iter().all(|name| name.len() <= 18));
        assert!(find("dropout").is_some() && find("drop").is_none());
    }
}
