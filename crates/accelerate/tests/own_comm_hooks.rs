//! Communication hooks that a program brings itself: what they see, what becomes of what they return, and how they fail.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Linear, ModuleFn, ParamStore};
use accelerate::optim::Sgd;
use accelerate::testing::ranks;
use accelerate::{
    Accelerator, AcceleratorBuilder, Callback, CommHook, DDPCommunicationHook, DDPCommunicationHookType,
    DistributedDataParallelKwargs, Error, FullyShardedDataParallelPlugin, GradBucket, ReduceOp, Result,
};
use rstest::rstest;
use std::sync::{Arc, Mutex};
use tch::{Kind, Tensor};

type Kwargs = DistributedDataParallelKwargs;

fn kwargs(hook: impl Into<DDPCommunicationHook>) -> Kwargs {
    Kwargs { comm_hook: Some(hook.into()), ..Default::default() }
}

fn fractions(shape: &[i64], salt: i64) -> Tensor {
    let values: Vec<f32> =
        (0..shape.iter().product()).map(|i| ((i * 37 + salt * 11) % 101) as f32 / 101.0 - 0.5).collect();
    Tensor::from_slice(&values).view(shape)
}

struct Net {
    store: ParamStore,
    layers: [Linear; 2],
}

impl Net {
    fn new(accelerator: &Accelerator, width: i64) -> Result<Self> {
        let store = ParamStore::new(accelerator.device());
        let layer = |name| Linear::new(store.root() / name, width, width, Default::default());
        let layers = [layer("first")?, layer("second")?];
        for (salt, param) in store.parameters().iter().enumerate() {
            param.copy_(&fractions(&param.shape(), salt as i64))?;
        }
        Ok(Self { store, layers })
    }

    fn forward(&self) -> impl Fn(&Tensor) -> Result<Tensor> + use<> {
        let layers = self.layers.clone();
        move |x: &Tensor| layers[1].forward(&layers[0].forward(x)?.f_tanh()?)
    }
}

/// The parameters after some steps, with batches of each rank's own.
fn train(accelerator: &Accelerator, steps: i64) -> Result<Vec<Vec<f32>>> {
    train_net(&Net::new(accelerator, 6)?, accelerator, steps)
}

fn train_net(net: &Net, accelerator: &Accelerator, steps: i64) -> Result<Vec<Vec<f32>>> {
    let optimizer = Sgd::new(&net.store, 0.05)?;
    let (model, mut optimizer) = accelerator.prepare((ModuleFn::new(&net.store, net.forward()), optimizer))?;
    for step in 0..steps {
        let rows =
            fractions(&[4, net.layers[0].weight.shape()[1]], 100 + 10 * step + accelerator.process_index() as i64);
        accelerator.backward(&model.forward(&rows)?.square().sum(Kind::Float))?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    let parameters = net.store.parameters();
    Ok(parameters.iter().map(|param| Vec::try_from(param.local().detach().reshape(-1)).unwrap()).collect())
}

fn train_with(kwargs: Kwargs) -> Vec<Vec<f32>> {
    let builder = Accelerator::builder().kwargs_handler(kwargs);
    let mut ranks = ranks(2, builder, |accelerator| train(&accelerator, 4)).unwrap();
    assert_eq!(ranks[0], ranks[1], "the ranks' parameters differ");
    ranks.swap_remove(0)
}

fn mean(bucket: &GradBucket<'_>) -> Result<Option<Tensor>> {
    let half = bucket.buffer.f_div_scalar(bucket.group.world_size() as f64)?;
    bucket.group.all_reduce(&half, ReduceOp::Sum)?;
    Ok(Some(half))
}

fn mean_of_16_bits(bucket: &GradBucket<'_>) -> Result<Option<Tensor>> {
    let narrow = bucket.buffer.f_to_kind(Kind::BFloat16)?.f_div_scalar(bucket.group.world_size() as f64)?;
    bucket.group.all_reduce(&narrow, ReduceOp::Sum)?;
    Ok(Some(narrow.f_to_kind(Kind::Float)?))
}

#[test]
fn what_a_hook_returns_is_what_the_optimizer_sees() {
    let plain = train_with(Kwargs::default());
    assert_eq!(train_with(kwargs(CommHook::new(mean))), plain);
    assert_eq!(train_with(kwargs(CommHook::new(|_| Ok(None)))), plain);
    let bf16 = train_with(kwargs(DDPCommunicationHookType::Bf16));
    assert_ne!(bf16, plain);
    assert_eq!(train_with(kwargs(CommHook::new(mean_of_16_bits))), bf16);
    // With a wrapper the hook itself works in 16 bits.
    let wrapped = Kwargs { comm_wrapper: Some(DDPCommunicationHookType::Bf16), ..kwargs(CommHook::new(mean)) };
    assert_eq!(train_with(wrapped), bf16);
    // What it has written to the buffer is averaged, too.
    let zero = CommHook::new(|bucket| {
        drop(bucket.buffer.shallow_clone().f_zero_()?);
        Ok(None)
    });
    let initial = ranks(1, Accelerator::builder(), |accelerator| train(&accelerator, 0)).unwrap();
    assert_eq!(train_with(kwargs(zero)), initial[0]);
}

/// One line for each bucket that a hook has seen.
fn seen_with(width: i64, kwargs: impl Fn(CommHook) -> Kwargs) -> Vec<String> {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&lines);
    let hook = CommHook::new(move |bucket| {
        let GradBucket { buffer, gradients, index, is_last, group } = bucket;
        let shapes: Vec<_> = gradients.iter().map(Tensor::size).collect();
        let elements: usize = gradients.iter().map(Tensor::numel).sum();
        assert_eq!((buffer.dim(), buffer.numel()), (1, elements));
        assert!(!torch_ext::autograd::is_grad_enabled() && group.world_size() == 2);
        if group.rank() == 0 {
            let line = format!("{index} {is_last} {:?} {:?} {shapes:?}", buffer.kind(), buffer.numel());
            seen.lock().unwrap().push(line);
        }
        Ok(None)
    });
    let builder = Accelerator::builder().kwargs_handler(kwargs(hook));
    ranks(2, builder, |accelerator| train_net(&Net::new(&accelerator, width)?, &accelerator, 2)).unwrap();
    let lines = lines.lock().unwrap();
    lines.clone()
}

#[test]
fn a_hook_sees_buckets_in_their_order() {
    // The first bucket takes a mebibyte at most, from the second pass on.
    let lines = seen_with(600, kwargs);
    let wanted = [
        "0 true Float 721200 [[600, 600], [600], [600, 600], [600]]",
        "0 false Float 360600 [[600], [600, 600]]",
        "1 true Float 360600 [[600], [600, 600]]",
    ];
    assert_eq!(lines, wanted);
    let wrapped = |hook| Kwargs { comm_wrapper: Some(DDPCommunicationHookType::Fp16), ..kwargs(hook) };
    // With a static graph, the first pass is reduced after it.
    let fixed = |hook| Kwargs { static_graph: Some(true), ..kwargs(hook) };
    assert_eq!(seen_with(6, fixed).len(), 2);
    assert_eq!(seen_with(6, wrapped)[0], "0 true Half 84 [[6, 6], [6], [6, 6], [6]]");
}

#[test]
fn every_model_has_a_state_of_its_own() {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&calls);
    let hook = CommHook::with_state(
        || 0,
        move |count, bucket| {
            *count += 1;
            if bucket.group.rank() == 0 {
                seen.lock().unwrap().push(*count);
            }
            Ok(None)
        },
    );
    ranks(2, Accelerator::builder().kwargs_handler(kwargs(hook)), |accelerator| {
        train(&accelerator, 3)?;
        train(&accelerator, 2)
    })
    .unwrap();
    assert_eq!(*calls.lock().unwrap(), [1, 2, 3, 1, 2]);
}

#[test]
fn gradients_are_those_of_the_window() {
    // The bucket holds what this rank has accumulated: the mean of its own micro-batches.
    let sums = Arc::new(Mutex::new(vec![0.0; 2]));
    let seen = Arc::clone(&sums);
    let hook = CommHook::new(move |bucket| {
        seen.lock().unwrap()[bucket.group.rank()] = bucket.buffer.f_sum(Kind::Double)?.f_double_value(&[])?;
        mean(bucket)
    });
    let builder = Accelerator::builder().kwargs_handler(kwargs(hook)).gradient_accumulation_steps(2);
    let reduced = ranks(2, builder, |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let weight = store.root().param("weight", Tensor::from_slice(&[1f32, 1.0]))?;
        let param = weight.clone();
        let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| Ok(param.get()? * x)))?;
        for micro_batch in 0..2 {
            let input = Tensor::full(
                [2],
                1 + micro_batch + 10 * accelerator.process_index() as i64,
                (Kind::Float, accelerator.device()),
            );
            accelerator.accumulate(&model, || accelerator.backward(&model.forward(&input)?.sum(Kind::Float)))?;
        }
        Ok(weight.grad().unwrap().double_value(&[0]))
    });
    assert_eq!(*sums.lock().unwrap(), [3.0, 23.0]);
    assert_eq!(reduced.unwrap(), [6.5, 6.5]);
}

fn fails(text: &'static str) -> impl Fn(&GradBucket<'_>) -> Result<Option<Tensor>> + Send + Sync {
    move |bucket| match bucket.group.rank() {
        1 => Err(Error::other(text)),
        _ => mean(bucket),
    }
}

fn panics(bucket: &GradBucket<'_>) -> Result<Option<Tensor>> {
    assert!(bucket.group.rank() == 0, "the hook of rank 1 gives up");
    mean(bucket)
}

fn leaves_the_mean_to_libtorch(bucket: &GradBucket<'_>) -> Result<Option<Tensor>> {
    if bucket.group.rank() == 1 { Err(Error::other("out of ideas")) } else { Ok(None) }
}

fn too_short(bucket: &GradBucket<'_>) -> Result<Option<Tensor>> {
    if bucket.group.rank() == 1 { Ok(Some(bucket.buffer.f_narrow(0, 0, 3)?)) } else { mean(bucket) }
}

fn of_another_type(bucket: &GradBucket<'_>) -> Result<Option<Tensor>> {
    if bucket.group.rank() == 1 { Ok(Some(bucket.buffer.f_to_kind(Kind::Double)?)) } else { mean(bucket) }
}

/// What both ranks say: the one whose hook fails, and the other.
fn failures(kwargs: Kwargs) -> [String; 2] {
    let builder: AcceleratorBuilder = Accelerator::builder().kwargs_handler(kwargs);
    let texts = ranks(2, builder, |accelerator| {
        let error = train(&accelerator, 1).unwrap_err();
        assert_eq!(error.is_peer_failure() || error.is_timeout(), accelerator.is_main_process(), "{error}");
        Ok(error.to_string())
    });
    let mut texts = texts.unwrap();
    [texts.swap_remove(1), texts.swap_remove(0)]
}

#[rstest]
#[case::an_error(CommHook::new(fails("no room")), "the communication hook, at bucket 0: no room")]
#[case::a_panic(CommHook::new(panics), "the communication hook panicked at bucket 0: the hook of rank 1 gives up")]
#[case::while_libtorch_averages(CommHook::new(leaves_the_mean_to_libtorch), "at bucket 0: out of ideas")]
#[case::a_wrong_shape(CommHook::new(too_short), "returned [3] Float on Cpu for bucket 0, which is [84] Float on Cpu")]
#[case::a_wrong_type(CommHook::new(of_another_type), "returned [84] Double on Cpu for bucket 0")]
fn a_hook_that_fails_is_the_error_of_backward(#[case] hook: CommHook, #[case] wanted: &str) {
    for static_graph in [None, Some(true)] {
        let [own, others] = failures(Kwargs { static_graph, ..kwargs(hook.clone()) });
        assert!(own.contains(wanted), "{own}");
        assert!(others.contains("rank 1 has left: ") && others.contains(wanted), "{others}");
    }
}

#[test]
fn a_function_that_is_no_hook_is_refused() {
    let wrong = DDPCommunicationHook::Function(Callback::new(1_u8));
    for num_processes in [1, 2] {
        let builder = Accelerator::builder().kwargs_handler(kwargs(wrong.clone()));
        let error = ranks(num_processes, builder, |accelerator| train(&accelerator, 1)).unwrap_err();
        assert!(error.is_config() && error.to_string().contains("make it with CommHook::new"), "{error}");
    }
}

#[test]
fn a_hook_is_refused_beside_what_it_cannot_go_with() {
    let hook = || kwargs(CommHook::new(mean));
    let sharded = Accelerator::builder().kwargs_handler(hook()).fsdp_plugin(FullyShardedDataParallelPlugin::default());
    let text = sharded.cpu(true).build().unwrap_err().to_string();
    assert!(text.contains("ddp_config.comm_hook a function of the program (code)"), "{text}");
    let options = [("warm_start".to_owned(), true.into())].into();
    let optional = Kwargs { comm_state_option: Some(options), ..hook() };
    let text = Accelerator::builder().kwargs_handler(optional).cpu(true).build().unwrap_err().to_string();
    assert!(text.contains("keeps its own state"), "{text}");
    assert!(serde_json::to_string(&hook()).unwrap_err().to_string().contains("a function of the program"));
}
