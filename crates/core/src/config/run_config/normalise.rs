//! What settings mean together: one function per record that has quirks.

use super::{Message, Notes, Overridden, PartialRunConfig, Unused};
use crate::Result;
use crate::config::{
    Auto, AutoWrapPolicy, ClusterConfig, DDPCommunicationHook, FP8BackendType, FP8RecipeKwargs, MixedPrecision,
    ReshardAfterForward, ShardingStrategy, no_msamp,
};
use crate::error::settings::SettingsErrorKind as Kind;
use crate::fp8::Fp8Recipe;
use crate::names::DistributedType;
use crate::settings::{Origin, Origins, Record, shortened_line};

type Messages = Vec<Message>;

/// Brings settings that speak of the same thing to one, record by record.
pub(super) fn normalise(partial: &mut PartialRunConfig, origins: &mut Origins, notes: &mut Notes) -> Result<()> {
    multi_gpu(partial, origins, notes);
    cluster(partial, origins)?;
    sharding(partial, origins)?;
    axes(partial, origins);
    if !notes.is_for_python {
        fp8(partial, origins, &mut notes.messages)?;
    }
    accumulation(partial, origins)?;
    match partial.cluster.use_fsdp {
        Some(true) => fsdp(partial, origins, notes)?,
        _ => unused(std::mem::take(&mut partial.fsdp), "fsdp_config", "--use_fsdp", origins, notes)?,
    }
    if partial.cluster.use_parallelism_config != Some(true) && !notes.is_for_python {
        let section = "parallelism_config";
        unused(std::mem::take(&mut partial.parallelism), section, "--use_parallelism_config", origins, notes)?;
    }
    if partial.cluster.use_deepspeed != Some(true) {
        unused(std::mem::take(&mut partial.deepspeed), "deepspeed_config", "--use_deepspeed", origins, notes)?;
    }
    replicas(partial, origins, &mut notes.messages)
}

fn contradiction(origins: &Origins, first: (&str, String), second: (&str, String), why: &'static str) -> crate::Error {
    let show = |(path, value): (&str, String)| format!("{path} {}", shortened_line(&value));
    let [first_origin, second_origin] = [first.0, second.0].map(|path| origins.get(path).to_string());
    Kind::Contradiction { first: show(first), first_origin, second: show(second), second_origin, why }.into()
}

fn refused(origins: &Origins, path: &str, found: String, why: &'static str) -> crate::Error {
    Kind::Refused { name: path.to_owned(), found, origin: origins.get(path).to_string(), why }.into()
}

/// `multi_gpu` is a distributed_type, too. Said closer to the program it takes the place of another one, with what that one brings.
fn multi_gpu(partial: &mut PartialRunConfig, origins: &mut Origins, notes: &mut Notes) {
    let cluster = &mut partial.cluster;
    let (origin, of_type) = (origins.get("multi_gpu").clone(), origins.get("distributed_type").clone());
    let replaced = cluster.distributed_type.filter(|it| *it != DistributedType::MultiGpu);
    let (Some(true), Some(replaced)) = (cluster.multi_gpu, replaced) else { return };
    if rank(&origin) >= rank(&of_type) {
        return;
    }
    let is_as_far = |path: &str| rank(origins.get(path)) >= rank(&of_type);
    if replaced == DistributedType::MultiCpu && is_as_far("use_cpu") {
        cluster.use_cpu = None;
        origins.forget_path("use_cpu");
    }
    cluster.distributed_type = Some(DistributedType::MultiGpu);
    origins.set_path("distributed_type", origin);
    notes.overridden.push(Overridden { setting: "distributed_type", value: replaced.to_string(), origin: of_type });
}

/// `distributed_type` of a file stands for the switches that flags have.
fn cluster(partial: &mut PartialRunConfig, origins: &mut Origins) -> Result<()> {
    let cluster = &mut partial.cluster;
    // Of a device and the wish for the CPU, the one that was said closer to the program counts.
    if cluster.use_cpu == Some(true)
        && cluster.torch_device.is_some()
        && rank(origins.get("use_cpu")) < rank(origins.get("torch_device"))
    {
        cluster.torch_device = None;
        origins.forget_path("torch_device");
    }
    let Some(distributed_type) = cluster.distributed_type else { return Ok(()) };
    let origin = origins.get("distributed_type").clone();
    let (field, path) = match distributed_type {
        DistributedType::Fsdp => (&mut cluster.use_fsdp, "use_fsdp"),
        DistributedType::DeepSpeed => (&mut cluster.use_deepspeed, "use_deepspeed"),
        DistributedType::MultiCpu => (&mut cluster.use_cpu, "use_cpu"),
        DistributedType::No => return one_process(cluster, origins),
        DistributedType::MultiGpu => return Ok(()),
        other => {
            let why = "choose NO, MULTI_CPU, MULTI_GPU, FSDP or DEEPSPEED";
            return Err(refused(origins, "distributed_type", other.to_string(), why));
        }
    };
    let is_in_the_same_file = matches!((&origin, origins.get(path)), (Origin::File { .. }, Origin::File { .. }));
    if *field == Some(false) && is_in_the_same_file {
        let (first, second) = (("distributed_type", distributed_type.to_string()), (path, "false".to_owned()));
        let why = "the distributed_type stands for that switch; set it to true, or leave it out";
        return Err(contradiction(origins, first, second, why));
    }
    if field.is_none() || rank(&origin) < rank(origins.get(path)) {
        *field = Some(true);
        origins.set_path(path, origin);
    }
    Ok(())
}

/// `NO` is one process (the reference starts one, whatever the number says). Of a type and a number that differ, the one that
/// was said closer to the program counts.
fn one_process(cluster: &mut ClusterConfig, origins: &mut Origins) -> Result<()> {
    let origin = origins.get("distributed_type").clone();
    match cluster.num_processes {
        Some(number) if number > 1 && rank(&origin) == rank(origins.get("num_processes")) => {
            let (first, second) = (("distributed_type", "NO".to_owned()), ("num_processes", number.to_string()));
            let why = "NO is one process; leave distributed_type out, or set num_processes to 1";
            Err(contradiction(origins, first, second, why))
        }
        None => {
            cluster.num_processes = Some(1);
            origins.set_path("num_processes", origin);
            Ok(())
        }
        Some(number) if number > 1 && rank(&origin) < rank(origins.get("num_processes")) => {
            cluster.num_processes = Some(1);
            origins.set_path("num_processes", origin);
            Ok(())
        }
        Some(_) => Ok(()),
    }
}

const FSDP_IS_CHOSEN: &str = "use_fsdp is true";
const DEEPSPEED_IS_CHOSEN: &str = "use_deepspeed is true";

/// A model is sharded in one way. Of two, the one that was said closer to the program counts.
fn sharding(partial: &mut PartialRunConfig, origins: &mut Origins) -> Result<()> {
    let cluster = &mut partial.cluster;
    if cluster.use_fsdp != Some(true) || cluster.use_deepspeed != Some(true) {
        // What is asked for must not meet the other one in the environment that processes inherit.
        if cluster.use_fsdp == Some(true) && cluster.use_deepspeed.is_none() {
            cluster.use_deepspeed = Some(false);
            origins.set_path("use_deepspeed", Origin::Derived(FSDP_IS_CHOSEN));
        } else if cluster.use_deepspeed == Some(true) && cluster.use_fsdp.is_none() {
            cluster.use_fsdp = Some(false);
            origins.set_path("use_fsdp", Origin::Derived(DEEPSPEED_IS_CHOSEN));
        }
        return Ok(());
    }
    let yes = || "true".to_owned();
    let (fsdp, deepspeed) = (origins.get("use_fsdp").clone(), origins.get("use_deepspeed").clone());
    match rank(&fsdp).cmp(&rank(&deepspeed)) {
        std::cmp::Ordering::Less => {
            cluster.use_deepspeed = Some(false);
            origins.set_path("use_deepspeed", Origin::Derived(FSDP_IS_CHOSEN));
        }
        std::cmp::Ordering::Greater => {
            cluster.use_fsdp = Some(false);
            origins.set_path("use_fsdp", Origin::Derived(DEEPSPEED_IS_CHOSEN));
        }
        std::cmp::Ordering::Equal => {
            let why = "both given; a model is sharded in one way, so choose one";
            return Err(contradiction(origins, ("use_fsdp", yes()), ("use_deepspeed", yes()), why));
        }
    }
    Ok(())
}

/// How close to the program something was said.
fn rank(origin: &Origin) -> u8 {
    match origin {
        Origin::Code => 0,
        Origin::Flag(_) => 1,
        Origin::Environment(_) => 2,
        Origin::File { .. } => 3,
        Origin::Derived(_) | Origin::Default => 4,
    }
}

/// In a file a section with axes stands for the switch that flags have, as in Python's launcher.
fn axes(partial: &mut PartialRunConfig, origins: &mut Origins) {
    let said = crate::config::ParallelismConfig::settings().iter().find(|setting| {
        matches!(origins.get(setting.path), Origin::File { .. }) && partial.parallelism.text(setting).is_some()
    });
    if let (Some(setting), None) = (said, partial.cluster.use_parallelism_config) {
        partial.cluster.use_parallelism_config = Some(true);
        origins.set_path("use_parallelism_config", origins.get(setting.path).clone());
    }
}

/// Who speaks of delayed scaling wants it. What counts with the other backend changes nothing.
fn fp8(partial: &mut PartialRunConfig, origins: &mut Origins, messages: &mut Messages) -> Result<()> {
    const BACKEND: &str = "fp8_config.backend";
    if partial.fp8.backend.is_none() && partial.fp8.speaks_of_delayed_scaling() {
        partial.fp8.backend = Some(FP8BackendType::TE);
        origins.set_path(BACKEND, Origin::Derived("settings of TransformerEngine's recipe are given"));
    }
    let backend = partial.fp8.backend.unwrap_or(FP8BackendType::AO);
    if backend == FP8BackendType::MSAMP {
        return Err(refused(origins, BACKEND, backend.to_string(), no_msamp()));
    }
    if partial.cluster.mixed_precision != Some(MixedPrecision::Fp8) {
        return Ok(());
    }
    Fp8Recipe::of_settings(&partial.fp8.clone().into())?;
    for setting in FP8RecipeKwargs::settings() {
        let needed = match setting.field {
            "recipe_name" | "enable_fsdp_float8_all_gather" => FP8BackendType::AO,
            "margin"
            | "interval"
            | "fp8_format"
            | "amax_history_len"
            | "amax_compute_algo"
            | "use_autocast_during_eval" => FP8BackendType::TE,
            _ => continue,
        };
        let Some(found) = partial.fp8.text(setting).filter(|found| !setting.asks_for_nothing(found)) else { continue };
        if needed != backend {
            let why = format!("it counts with backend {needed}, and the backend is {backend}");
            messages.push(Message { setting: setting.path, found, origin: origins.get(setting.path).clone(), why });
        }
    }
    Ok(())
}

/// The number of micro-batches may be said in four places. Those that are equally close to the program must agree.
fn accumulation(partial: &mut PartialRunConfig, origins: &mut Origins) -> Result<()> {
    let outer = "dataloader_config.gradient_accumulation_kwargs";
    if let Some(kwargs) = partial.dataloader.gradient_accumulation_kwargs.clone() {
        let plugin = &mut partial.gradient_accumulation;
        for setting in crate::config::GradientAccumulationPlugin::settings() {
            let (Some(inner), said) = (kwargs.text(setting), plugin.text(setting)) else { continue };
            match said {
                Some(said) if said != inner && rank(origins.get(setting.path)) == rank(origins.get(outer)) => {
                    let why = "they speak of the same; let them agree, or leave one out";
                    return Err(contradiction(origins, (setting.path, said), (outer, inner), why));
                }
                Some(_) if rank(origins.get(setting.path)) < rank(origins.get(outer)) => {}
                _ => {
                    plugin.say(setting, &inner);
                    origins.set(setting, origins.get(outer).clone());
                }
            }
        }
    }
    match partial.cluster.use_deepspeed {
        Some(true) => accumulation_of_deepspeed(partial, origins),
        _ => Ok(()),
    }
}

fn accumulation_of_deepspeed(partial: &mut PartialRunConfig, origins: &mut Origins) -> Result<()> {
    let (steps, configured) =
        ("gradient_accumulation_config.num_steps", "deepspeed_config.gradient_accumulation_steps");
    let (said, of_deepspeed) = (partial.gradient_accumulation.num_steps, partial.deepspeed.gradient_accumulation_steps);
    let is_closer = rank(origins.get(steps)).cmp(&rank(origins.get(configured)));
    match (said, of_deepspeed.and_then(Auto::value)) {
        (Some(said), Some(configured_steps)) if is_closer.is_eq() && said != configured_steps => {
            let (first, second) = ((steps, said.to_string()), (configured, configured_steps.to_string()));
            return Err(contradiction(origins, first, second, "let them agree, or leave one out"));
        }
        (Some(said), of_deepspeed) if of_deepspeed.is_none() || is_closer.is_lt() => {
            partial.deepspeed.gradient_accumulation_steps = Some(Auto::Value(said));
            origins.set_path(configured, origins.get(steps).clone());
        }
        (said, Some(configured_steps)) if said.is_none() || is_closer.is_gt() => {
            partial.gradient_accumulation.num_steps = Some(configured_steps);
            origins.set_path(steps, origins.get(configured).clone());
        }
        _ => {}
    }
    Ok(())
}

/// What `reshard_after_forward` means in version 1, and what launchers say unasked.
fn fsdp(partial: &mut PartialRunConfig, origins: &mut Origins, notes: &mut Notes) -> Result<()> {
    match partial.fsdp.fsdp_version {
        Some(2) => resharding_of_version_2(partial, origins, notes)?,
        _ => resharding_of_version_1(partial, origins)?,
    }
    let plugin = &mut partial.fsdp;
    let is_by_size = plugin.auto_wrap_policy == Some(AutoWrapPolicy::SizeBasedWrap);
    // Launchers of the reference say it unasked in the environment; in files its questionnaire writes it only where it counts.
    let is_asked = !matches!(origins.get("fsdp_config.min_num_params"), Origin::Environment(_));
    if plugin.min_num_params.is_some() && !is_by_size && !is_asked {
        plugin.min_num_params = None;
    }
    if plugin.sharding_strategy == Some(ShardingStrategy::NoShard) {
        no_shard(partial, origins, &mut notes.messages);
    }
    Ok(())
}

const STRATEGY: &str = "fsdp_config.sharding_strategy";
const RESHARD: &str = "fsdp_config.reshard_after_forward";

/// In version 2 it is yes or no, and takes the place of a strategy.
fn resharding_of_version_2(partial: &mut PartialRunConfig, origins: &mut Origins, notes: &mut Notes) -> Result<()> {
    let plugin = &mut partial.fsdp;
    match plugin.reshard_after_forward {
        // The number of FULL_SHARD is also a way to write "true".
        Some(ReshardAfterForward::FullShard) => plugin.reshard_after_forward = Some(true.into()),
        Some(other) => {
            if let Some(named) = other.strategy() {
                return Err(refused(origins, RESHARD, named.to_string(), "with version 2 it is true or false"));
            }
        }
        None => {}
    }
    let Some(named) = plugin.sharding_strategy.filter(|named| *named != ShardingStrategy::FullShard) else {
        return Ok(());
    };
    match *origins.get(STRATEGY) == Origin::Code {
        // What the program says of the strategy goes before what somebody else says of resharding.
        true if rank(origins.get(RESHARD)) > 0 => {
            plugin.reshard_after_forward = None;
            origins.forget_path(RESHARD);
            Ok(())
        }
        true => Ok(()),
        // PyTorch's engine passes over it.
        false if notes.is_for_python => {
            let why = "version 2 reads reshard_after_forward only, which is false for SHARD_GRAD_OP".to_owned();
            let (found, origin) = (named.to_string(), origins.get(STRATEGY).clone());
            notes.messages.push(Message { setting: STRATEGY, found, origin, why });
            Ok(())
        }
        false => {
            let why =
                "version 2 has FULL_SHARD only; set reshard_after_forward to false for SHARD_GRAD_OP, or version 1";
            Err(refused(origins, STRATEGY, named.to_string(), why))
        }
    }
}

/// In version 1 it may name a strategy. Launchers write FULL_SHARD and "true" into the environment unasked, so there another
/// strategy is the one that was meant. Nobody writes both into one file unasked.
fn resharding_of_version_1(partial: &mut PartialRunConfig, origins: &mut Origins) -> Result<()> {
    let plugin = &mut partial.fsdp;
    let Some(reshard) = plugin.reshard_after_forward else { return Ok(()) };
    let (of_strategy, of_reshard) = (rank(origins.get(STRATEGY)), rank(origins.get(RESHARD)));
    let is_asked = |rank: u8| rank <= 1;
    let Some(named) = reshard.strategy() else {
        let is_unasked = reshard == ReshardAfterForward::Yes && !is_asked(of_reshard);
        if is_unasked || (plugin.sharding_strategy.is_some() && of_strategy < of_reshard) {
            plugin.reshard_after_forward = None;
            origins.forget_path(RESHARD);
        }
        return Ok(());
    };
    let said = plugin.sharding_strategy;
    let is_in_one_file =
        matches!((origins.get(STRATEGY), origins.get(RESHARD)), (Origin::File { .. }, Origin::File { .. }));
    let is_unasked = |strategy| {
        strategy == ShardingStrategy::FullShard && !is_asked(of_strategy) && !is_asked(of_reshard) && !is_in_one_file
    };
    match said {
        Some(other) if other != named && of_strategy == of_reshard && !is_unasked(other) => {
            let why = "they name two strategies; set one of them, or both alike";
            return Err(contradiction(origins, (STRATEGY, other.to_string()), (RESHARD, named.to_string()), why));
        }
        Some(other) if other != named && of_strategy < of_reshard && !is_unasked(other) => {}
        _ => {
            plugin.sharding_strategy = Some(named);
            origins.set_path(STRATEGY, origins.get(RESHARD).clone());
        }
    }
    plugin.reshard_after_forward = None;
    origins.forget_path(RESHARD);
    Ok(())
}

/// Nothing is ever gathered, so there is nothing to fetch ahead.
fn no_shard(partial: &PartialRunConfig, origins: &Origins, messages: &mut Messages) {
    let why = "with sharding_strategy NO_SHARD nothing is ever gathered";
    let names = ["backward_prefetch", "forward_prefetch", "limit_all_gathers", "direct_all_gather", "dynamic"];
    for setting in crate::config::FullyShardedDataParallelPlugin::settings() {
        let Some(found) = partial.fsdp.text(setting) else { continue };
        if names.contains(&setting.field) && !setting.asks_for_nothing(&found) {
            let origin = origins.get(setting.path).clone();
            messages.push(Message { setting: setting.path, found, origin, why: why.to_owned() });
        }
    }
}

/// A record whose switch is off: an error for who typed a flag of it, a message for who wrote it elsewhere. Processes are told
/// what flags and files say of it all the same, because a program may switch it on.
fn unused<R: Record>(
    record: R,
    section: &str,
    switch: &'static str,
    origins: &mut Origins,
    notes: &mut Notes,
) -> Result<()> {
    let mut is_told = false;
    let why =
        format!("{section} counts only with {switch}, the distributed_type of that name, or a plugin of the program");
    for setting in R::settings() {
        let Some(found) = record.text(setting) else { continue };
        let origin = origins.get(setting.path).clone();
        origins.forget(setting);
        if !matches!(origin, Origin::Flag(_) | Origin::File { .. }) {
            continue;
        }
        if let Origin::Flag(flag) = &origin {
            check_flag_of_unused(flag, &found, switch, origins)?;
        }
        if !std::mem::replace(&mut is_told, true) {
            let (found, origin, why) = (found.clone(), origin.clone(), why.clone());
            notes.messages.push(Message { setting: setting.path, found, origin, why });
        }
        notes.unused.push(Unused { setting, found, origin, why: why.clone() });
    }
    Ok(())
}

/// Whoever types a flag means it, so that something must have switched its record on. A program may choose otherwise.
fn check_flag_of_unused(flag: &str, found: &str, switch: &'static str, origins: &Origins) -> Result<()> {
    let other = if switch == "--use_fsdp" { "use_deepspeed" } else { "use_fsdp" };
    let (of_switch, of_other) = (origins.get(path_of(switch)), origins.get(other));
    if *of_switch == Origin::Code || *of_other == Origin::Code {
        return Ok(());
    }
    let flag = format!("{flag} {}", shortened_line(found));
    let (second, second_origin, why) = match of_switch {
        Origin::Default => return Err(Kind::MissingSwitch { flag, switch }.into()),
        Origin::Derived(_) => {
            let why = "a model is sharded in one way, so choose one, and leave the flags of the other out";
            (format!("{other} true"), of_other.to_string(), why)
        }
        said => {
            let why = "it has no effect while that is false; set it to true, or leave the flag out";
            (format!("{} false", path_of(switch)), said.to_string(), why)
        }
    };
    let (first, first_origin) = (flag, "flag".to_owned());
    Err(Kind::Contradiction { first, first_origin, second, second_origin, why }.into())
}

/// The setting that a switch such as `--use_fsdp` stands for.
fn path_of(switch: &'static str) -> &'static str {
    switch.trim_start_matches('-')
}

/// Settings of replicas beside a model that is sharded: hooks would change what is computed, so they are refused.
fn replicas(partial: &PartialRunConfig, origins: &Origins, messages: &mut Messages) -> Result<()> {
    let cluster = &partial.cluster;
    let is_sharded =
        cluster.use_fsdp == Some(true) && partial.fsdp.sharding_strategy != Some(ShardingStrategy::NoShard);
    if !is_sharded {
        return Ok(());
    }
    let hook = partial.ddp.comm_hook.clone();
    let wrapper = partial.ddp.comm_wrapper.map(DDPCommunicationHook::from);
    for (path, hook) in [("ddp_config.comm_hook", hook), ("ddp_config.comm_wrapper", wrapper)] {
        if let Some(hook) = hook.filter(|hook| !hook.is_none()) {
            let why = "gradients of sharded models travel as mixed_precision_policy.reduce_dtype says; set that";
            return Err(contradiction(origins, (path, hook.to_string()), ("use_fsdp", "true".to_owned()), why));
        }
    }
    for setting in crate::config::DistributedDataParallelKwargs::settings() {
        let Some(found) = partial.ddp.text(setting).filter(|found| !setting.asks_for_nothing(found)) else { continue };
        let why = "models are sharded, so there are no replicas that average gradients".to_owned();
        messages.push(Message { setting: setting.path, found, origin: origins.get(setting.path).clone(), why });
    }
    Ok(())
}
