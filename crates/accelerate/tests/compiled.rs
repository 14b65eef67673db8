//! Models that were compiled elsewhere: TorchScript files and packages of AOTInductor, and what `prepare` says to others.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{AotInductorModule, Linear, Module, ModuleFn, ParamStore, ScriptModule};
use accelerate::optim::Sgd;
use accelerate::tch::{Device, Kind, Tensor, no_grad};
use accelerate::{Accelerator, DynamoBackend, Error, TorchDynamoPlugin, testing};
use std::path::{Path, PathBuf};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compiled").join(name)
}

fn accelerator(backend: DynamoBackend) -> Accelerator {
    Accelerator::builder().cpu(true).dynamo_backend(backend).build().unwrap()
}

fn input() -> Tensor {
    Tensor::from_slice2(&[[1f32, 2.0, 3.0], [-1.0, 0.5, 2.0]])
}

fn close(found: &Tensor, wanted: &[f64]) {
    let wanted = Tensor::from_slice(wanted).to_kind(found.kind()).view_as(found);
    assert!(found.allclose(&wanted, 1e-5, 1e-6, false), "{found:?} {found} instead of {wanted}");
}

/// What `generate.py` prints for the first row.
const OUTPUT: [f64; 2] = [-0.139_000_251_889_228_82, 0.204_998_761_415_481_57];

#[test]
fn a_script_has_its_parameters_by_name_and_python_s_outputs() {
    let model: ScriptModule = ScriptModule::load(file("mlp.pt"), Device::Cpu).unwrap();
    let names: Vec<String> = model.params().named_parameters().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"]);
    let buffers: Vec<String> = model.params().buffers().iter().map(|buffer| buffer.name().to_owned()).collect();
    assert_eq!(buffers, ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]);
    model.params().eval();
    let output = model.forward(&input().narrow(0, 0, 1)).unwrap();
    close(&output, &OUTPUT);
    assert!(output.requires_grad());
    assert!(!no_grad(|| model.forward(&input())).unwrap().requires_grad());
}

#[test]
fn the_mode_of_the_store_is_that_of_the_script() {
    let model: ScriptModule = ScriptModule::load(file("mlp.pt"), Device::Cpu).unwrap();
    let counter = || model.params().get("norm.num_batches_tracked").unwrap().get().unwrap().int64_value(&[]);
    let _ = model.forward(&input()).unwrap();
    assert_eq!(counter(), 1, "models begin in training mode");
    model.params().eval();
    let first = model.forward(&input()).unwrap();
    assert_eq!(first, model.forward(&input()).unwrap(), "no dropout in evaluation mode");
    assert_eq!(counter(), 1);
    model.params().train();
    let _ = model.forward(&input()).unwrap();
    assert_eq!(counter(), 2);
}

/// Against the same layers in Rust, without dropout and batch statistics.
#[test]
fn a_script_learns_as_the_same_model_in_rust() {
    let accelerator = accelerator(DynamoBackend::Ts);
    let script: ScriptModule = ScriptModule::load(file("mlp.pt"), accelerator.device()).unwrap();
    script.params().eval();
    let store = ParamStore::new(Device::Cpu);
    let hidden = Linear::new(store.root() / "hidden", 3, 4, Default::default()).unwrap();
    let norm = accelerate::nn::BatchNorm1d::new(store.root() / "norm", 4, Default::default()).unwrap();
    let head = Linear::new(store.root() / "head", 4, 2, Default::default()).unwrap();
    store.load_state_dict(&script.params().state_dict().unwrap(), Default::default()).unwrap();
    store.eval();
    let rust = ModuleFn::new(&store, move |x: &Tensor| head.forward(&norm.forward(&hidden.forward(x)?)?.relu()));
    let script_optimizer = Sgd::new(script.params(), 0.1).unwrap();
    let rust_optimizer = Sgd::new(&store, 0.1).unwrap();
    let before = script.params().get("head.weight").unwrap().get().unwrap().copy();
    let script = accelerator.prepare(script).unwrap();
    let plain = Accelerator::builder().cpu(true).build().unwrap();
    let (rust, mut rust_optimizer) = plain.prepare((rust, rust_optimizer)).unwrap();
    let mut script_optimizer = accelerator.prepare(script_optimizer).unwrap();
    for _ in 0..3 {
        for (loss, optimizer) in [
            (script.forward(&input()).unwrap(), &mut script_optimizer),
            (rust.forward(&input()).unwrap(), &mut rust_optimizer),
        ] {
            accelerator.backward(&loss.square().sum(Kind::Float)).unwrap();
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
        }
    }
    assert_ne!(before, script.params().get("head.weight").unwrap().get().unwrap());
    for (name, param) in store.named_parameters() {
        let learned = script.params().get(&name).unwrap().get().unwrap();
        assert!(learned.allclose(&param.get().unwrap(), 1e-5, 1e-6, false), "{name}");
    }
}

#[test]
fn tied_weights_are_one_and_outputs_may_be_several() {
    type Two = (Tensor, Tensor);
    let model: ScriptModule<Two, (Tensor, Tensor, Tensor)> = ScriptModule::load(file("tied.pt"), Device::Cpu).unwrap();
    assert_eq!(model.params().num_parameters(), 4);
    assert_eq!(
        model.params().aliases().into_iter().collect::<Vec<_>>(),
        [("unembed.weight".to_owned(), "embed.weight".to_owned())]
    );
    let inputs = (Tensor::from_slice(&[1f32, 1.0]), Tensor::from_slice(&[0.5f32, 0.0]));
    let (hidden, output, sum) = model.forward(&inputs).unwrap();
    // weight is [[-0.2, -0.1], [0.0, 0.1]]
    close(&hidden, &[0.2, 0.1]);
    close(&output, &[-0.05, 0.01]);
    close(&sum, &[0.3]);
    torch_gradient(&output);
    // Through both uses: of unembed outer(1, hidden), of embed outer(weight^T 1, x).
    close(&model.params().get("embed.weight").unwrap().grad().unwrap(), &[0.0, -0.1, 0.2, 0.1]);

    let wrong: ScriptModule<Two> = ScriptModule::load(file("tied.pt"), Device::Cpu).unwrap();
    let error = wrong.forward(&inputs).unwrap_err().to_string();
    assert!(error.contains("gave 3 tensors, but the program takes 1"), "{error}");
}

fn torch_gradient(output: &Tensor) {
    output.sum(Kind::Float).backward();
}

#[test]
fn ranks_average_the_gradients_of_scripts() {
    let gradients = testing::ranks(2, Accelerator::builder().dynamo_backend(DynamoBackend::Ts), |accelerator| {
        let model: ScriptModule = ScriptModule::load(file("mlp.pt"), accelerator.device())?;
        model.params().eval();
        let model = accelerator.prepare(model)?;
        let row = input().narrow(0, accelerator.process_index() as i64, 1);
        accelerator.backward(&model.forward(&row)?.sum(Kind::Float))?;
        let gradient = model.params().get("hidden.weight").and_then(|param| param.grad());
        gradient.ok_or_else(|| Error::other("no gradient"))
    })
    .unwrap();
    assert_eq!(gradients[0], gradients[1]);
    let alone: ScriptModule = ScriptModule::load(file("mlp.pt"), Device::Cpu).unwrap();
    alone.params().eval();
    torch_gradient(&(alone.forward(&input()).unwrap() / 2.0));
    let wanted = alone.params().get("hidden.weight").unwrap().grad().unwrap();
    assert!(gradients[0].allclose(&wanted, 1e-5, 1e-7, false));
}

#[test]
fn files_that_are_no_scripts_or_packages_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.pt");
    std::fs::write(&text, "not a model").unwrap();
    let truncated = folder.path().join("truncated.pt");
    let whole = std::fs::read(file("mlp.pt")).unwrap();
    std::fs::write(&truncated, &whole[..whole.len() / 2]).unwrap();
    for path in [folder.path().join("missing.pt"), text, truncated] {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let script = ScriptModule::<Tensor>::load(&path, Device::Cpu).unwrap_err();
        assert!(script.to_string().contains(&name), "{script}");
        let package = AotInductorModule::<Tensor>::load(&path, Device::Cpu, &[]).unwrap_err();
        assert!(package.to_string().contains(&name), "{package}");
    }
    let package = AotInductorModule::<Tensor>::load(file("mlp.pt"), Device::Cpu, &[]).unwrap_err();
    assert!(package.to_string().contains("mlp.pt"), "{package}");
}

#[test]
fn a_model_that_is_not_compiled_is_refused_with_the_cure() {
    for (backend, cure) in
        [(DynamoBackend::Ts, "nn::ScriptModule"), (DynamoBackend::AotInductor, "aoti_compile_and_package")]
    {
        let store = ParamStore::new(Device::Cpu);
        let model = ModuleFn::new(&store, |x: &Tensor| Ok(x.shallow_clone()));
        let error = accelerator(backend).prepare(model).unwrap_err();
        assert!(error.is_config() && error.to_string().contains(cure), "{error}");
        assert!(error.to_string().contains("not compiled") && error.to_string().contains(backend.as_str()), "{error}");
    }
    let script: ScriptModule = ScriptModule::load(file("mlp.pt"), Device::Cpu).unwrap();
    let error = accelerator(DynamoBackend::AotInductor).prepare(script).unwrap_err();
    assert!(error.to_string().contains("the model is TorchScript"), "{error}");
    // Who asks for no compiler may prepare what is compiled.
    for backend in [DynamoBackend::No, DynamoBackend::Eager] {
        let script: ScriptModule = ScriptModule::load(file("mlp.pt"), Device::Cpu).unwrap();
        accelerator(backend).prepare(script).unwrap();
    }
}

#[test]
fn settings_of_the_compiler_are_checked_when_the_accelerator_is_built() {
    let builder = || Accelerator::builder().cpu(true);
    let plugin = TorchDynamoPlugin { backend: Some(DynamoBackend::Ts), fullgraph: Some(true), ..Default::default() };
    for (builder, words) in [
        (builder().dynamo_plugin(plugin.clone()), "TorchDynamoPlugin.fullgraph is true"),
        (builder().dynamo_plugin(plugin).dynamo_backend(DynamoBackend::Ts), "both given"),
        (builder().dynamo_backend(DynamoBackend::Inductor), "\"inductor\" needs Python"),
        (builder().dynamo_backend(DynamoBackend::Cudagraphs), "computes on Cpu"),
    ] {
        let error = builder.build().unwrap_err();
        assert!(error.is_config() && error.to_string().contains(words), "{error}");
    }
}

/// The compiled code is the machine's own, so the package is made where it is wanted: `generate.py <path>`, then
/// `ACCELERATE_TEST_AOTI_PACKAGE=<path> cargo nextest run -p accelerate-rs a_package_computes`. Without one this test does not
/// exist; what is no package is checked above.
#[cfg(aoti_package)]
#[test]
fn a_package_computes_what_the_model_does_and_nothing_else() {
    let path = PathBuf::from(env!("ACCELERATE_TEST_AOTI_PACKAGE"));
    let accelerator = accelerator(DynamoBackend::AotInductor);
    let inputs = [accelerate::nn::InputSpec::new(&[-1, 3], Kind::Float)];
    let model: AotInductorModule = AotInductorModule::load(&path, Device::Cpu, &inputs).unwrap();
    assert!(model.params().parameters().is_empty());
    let model = accelerator.prepare(model).unwrap();
    let output = no_grad(|| model.forward(&input())).unwrap();
    assert_eq!(output.size(), [2, 2]);
    close(&output.narrow(0, 0, 1), &OUTPUT);
    // A view with other strides.
    let turned = Tensor::from_slice2(&[[1f32, -1.0], [2.0, 0.5], [3.0, 2.0]]).transpose(0, 1);
    assert_eq!(model.forward(&turned).unwrap(), output);

    for (input, words) in [
        (input().set_requires_grad(true), "no backward pass"),
        (input().to_kind(Kind::Double), "Double"),
        (Tensor::ones([2, 4], (Kind::Float, Device::Cpu)), "[2, 4]"),
        (Tensor::ones([3], (Kind::Float, Device::Cpu)), "[3]"),
    ] {
        let error = model.forward(&input).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    let error = AotInductorModule::<Tensor>::load(&path, Device::Cpu, &[]).unwrap_err();
    assert!(error.to_string().contains("takes 1 inputs, 0 are declared"), "{error}");
    let two: AotInductorModule<Tensor, (Tensor, Tensor)> =
        AotInductorModule::load(&path, Device::Cpu, &inputs).unwrap();
    assert!(two.forward(&input()).unwrap_err().to_string().contains("gave 1 tensors"));
    let cuda = AotInductorModule::<Tensor>::load(&path, Device::Cuda(0), &inputs).unwrap_err();
    assert!(cuda.to_string().contains("compiled for cpu and is loaded for cuda"), "{cuda}");
}
