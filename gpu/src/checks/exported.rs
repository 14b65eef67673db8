//! Models of Python that AOTInductor has compiled to machine code, for training and for inference.

use std::path::Path;
use std::process::Command;

use accelerate::DynamoBackend;
use accelerate::nn::{AotInductorModule, ExportedModule, InputSpec, Module as _};
use accelerate::optim::Sgd;
use accelerate::tch::{Kind, Tensor, no_grad};
use accelerate_launch::{Limits, ask};
use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::check::{Context, Found, NO_PYTHON, printed_by};
use crate::models::{ROWS, tokens};

/// What `accelerate export-model` has Python run.
const PROGRAM: &str = include_str!("../../../crates/cli/src/export_model/export_model.py");

#[derive(Deserialize)]
struct Answer {
    losses: Vec<f64>,
    logits: Vec<f64>,
}

/// Inductor compiles its code for the CPU, and the frame of its code for a GPU, with this.
fn compiler() -> Option<String> {
    let name = std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
    let output = ask(Command::new(&name).arg("--version"), Limits::default()).ok()?;
    output.status.success().then_some(name)
}

/// What `accelerate export-model exported:Trained --inputs 'int64[rows,8]' 'int64[rows,8]'` tells that program.
fn order(output: &str, device: &str, failure: &Path) -> Value {
    let rows = json!({ "dtype": "int64", "is_whole": true, "sizes": [6, 8], "count": 48, "names": { "0": "rows" } });
    let described = json!({ "dtype": "int64", "shape": [-1, 8] });
    json!({
        "module": "exported",
        "function": "Trained",
        "inputs": [rows, rows],
        "integers": 2,
        "output": output,
        "device": device,
        "torch_version": "2.11.0",
        "failure": failure,
        "signature": { "version": 1, "inputs": [described, described] },
    })
}

/// Compiled code adds up in another order: 1e-6 of a loss of 5 in each step, and of logits. Another gradient shows at 1e-2.
pub(crate) fn trains(context: &Context<'_>) -> Result<Found> {
    if compiler().is_none() {
        return Found::not_here("Inductor needs g++ or what CXX names, and neither starts");
    }
    let path = |name: &str| context.folder.join(name);
    let (package, for_inference) = (path("model.pt2"), path("for_inference.pt2"));
    let (file, inference_file) = (package.to_str(), for_inference.to_str());
    let (file, inference_file) = file.zip(inference_file).context("the folder is no text")?;
    let Some(mut export) = context.python_program(PROGRAM)? else { return Found::not_here(NO_PYTHON) };
    let failure = path("failure.json");
    export.arg(order(file, context.device_name(), &failure).to_string());
    // Compilers take most of the time, and use one core each.
    eprintln!("export_model.py and exported.py compile packages, side by side");
    let (exported, wanted) = std::thread::scope(|scope| {
        let exported = scope.spawn(|| {
            // What went wrong is in a file, for the command that usually runs it.
            printed_by(&mut export, "export_model.py")
                .with_context(|| std::fs::read_to_string(&failure).unwrap_or_default())
        });
        let wanted = context.python("exported.py", &["--output", inference_file]);
        (exported.join(), wanted)
    });
    exported.map_err(|_| anyhow::anyhow!("the thread of export_model.py panicked"))??;
    let wanted: Answer = wanted?.context("no Python")?;
    eprintln!("both packages are there, and are loaded");

    let accelerator = context.builder().dynamo_backend(DynamoBackend::AotInductor).build()?;
    let model: ExportedModule<(Tensor, Tensor), (Tensor, Tensor)> =
        ExportedModule::load(&package, accelerator.device())?;
    let store = model.params().clone();
    let optimizer = Sgd::new(&store, 0.1)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let (mut losses, mut evaluated) = (Vec::new(), Vec::new());
    for step in 0..wanted.losses.len() {
        let batch = tokens(step, 0, ROWS, accelerator.device())?;
        store.eval();
        evaluated.push(no_grad(|| model.forward(&batch))?.0.f_double_value(&[])?);
        store.train();
        let (loss, _) = model.forward(&batch)?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(loss.f_double_value(&[])?);
    }
    let training = context.all_close("loss of step", &losses, &wanted.losses, 1e-4)?;
    context.all_close("loss in evaluation before step", &evaluated, &losses, 1e-4)?;
    ensure!(losses.last() < losses.first(), "the loss did not fall: {losses:?}");

    let inputs = [InputSpec::new(&[-1, 8], Kind::Int64)];
    let module: AotInductorModule = AotInductorModule::load(&for_inference, accelerator.device(), &inputs)?;
    let module = accelerator.prepare(module)?;
    let (given, _) = tokens(0, 0, ROWS, accelerator.device())?;
    let logits = no_grad(|| module.forward(&given))?.f_to_kind(Kind::Double)?.f_reshape([-1])?;
    let logits = Vec::<f64>::try_from(logits.f_to_device(accelerate::tch::Device::Cpu)?)?;
    let inference = context.all_close("logit", &logits, &wanted.logits, 1e-4)?;
    Found::figure(format!("{} steps within {training:.1e} of Python, logits {inference:.1e}", losses.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The program runs here only where there is Python, so a change of what it takes would be seen late.
    #[test]
    fn the_program_is_told_what_it_takes() {
        let order = order("model.pt2", "cpu", Path::new("failure.json"));
        let taken = PROGRAM.split_once("def main(").and_then(|(_, rest)| rest.split_once(", **_)"));
        let taken: Vec<&str> = taken.map_or_else(Vec::new, |(names, _)| names.split(", ").collect());
        assert!(taken.len() > 5 && taken.iter().chain(&["failure"]).all(|name| order.get(name).is_some()), "{taken:?}");
        let of_inputs = ["dtype", "is_whole", "sizes", "count", "names"];
        for name in of_inputs {
            assert!(
                PROGRAM.contains(&format!("given[\"{name}\"]")) && order["inputs"][0].get(name).is_some(),
                "{name}"
            );
        }
    }
}
