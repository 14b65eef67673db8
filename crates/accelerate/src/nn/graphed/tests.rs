//! What the passes of a graphed model do, with a stand-in for the graphs: it does the recorded work again, or fails to.

use super::*;
use crate::nn::{BatchNorm1d, Dropout, Embedding, Linear, ModuleFn};
use crate::optim::{Optimizer, Sgd};
use crate::{Accelerator, FullyShardedDataParallelPlugin, set_seed};
use std::sync::atomic::{AtomicUsize, Ordering};
use tch::{Device, Kind};
use torch_ext::autograd::{BackwardOptions, backward};

/// How the stand-in goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// Replays leave what was there when it was recorded.
    Forgets,
    /// Backward passes do.
    ForgetsBackward,
    /// The first so many replays are right.
    After(usize),
    /// The work cannot be recorded.
    Refuses,
}

#[derive(Clone)]
struct StandIn {
    fault: Fault,
    num_recorded: Arc<AtomicUsize>,
    num_replayed: Arc<AtomicUsize>,
}

impl StandIn {
    fn new(fault: Fault) -> Self {
        Self { fault, num_recorded: Arc::default(), num_replayed: Arc::default() }
    }
}

impl Recorder for StandIn {
    /// Its number, from 0.
    type Recording = usize;

    fn fresh(&self) -> Result<Self> {
        Ok(self.clone())
    }

    fn warm_up(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        work()
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<usize> {
        if self.fault == Fault::Refuses {
            return Err(crate::Error::other("the stream waits for the host"));
        }
        work()?;
        Ok(self.num_recorded.fetch_add(1, Ordering::Relaxed))
    }

    fn replay(&self, recording: &usize, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let num_before = self.num_replayed.fetch_add(1, Ordering::Relaxed);
        let forgets = match self.fault {
            Fault::None | Fault::Refuses => false,
            Fault::Forgets => true,
            Fault::ForgetsBackward => recording % 2 == 1,
            Fault::After(most) => num_before >= most,
        };
        if forgets { Ok(()) } else { work() }
    }
}

type Batch = (Tensor, Tensor);
type Forward = Box<dyn Fn(&Batch) -> Result<(Tensor, Tensor)>>;

/// Random numbers, a buffer that each pass changes, a weight without a gradient, and two outputs.
fn model() -> Result<ModuleFn<Forward, Batch, (Tensor, Tensor)>> {
    set_seed(3);
    let store = ParamStore::new(Device::Cpu);
    let root = store.root();
    let embed = Embedding::new(&root / "embed", 11, 6, Default::default())?;
    let norm = BatchNorm1d::new(&root / "norm", 6, Default::default())?;
    let dropout = Dropout::new(&root / "dropout", 0.25)?;
    let head = Linear::new(&root / "head", 6, 3, Default::default())?;
    let _unused = Linear::new(&root / "unused", 2, 2, Default::default())?;
    let forward: Forward = Box::new(move |(rows, labels)| {
        let hidden = norm.forward(&embed.forward(rows)?)?.f_relu()?;
        let logits = head.forward(&dropout.forward(&hidden)?)?;
        let loss = logits.f_to_kind(Kind::Float)?;
        let loss = loss.f_cross_entropy_loss(labels, None::<&Tensor>, tch::Reduction::Mean, -100, 0.0)?;
        Ok((loss, logits))
    });
    Ok(ModuleFn::new(&store, forward))
}

fn batch(step: i64, rows: i64) -> Batch {
    let numbers = Tensor::arange(rows, (Kind::Int64, Device::Cpu)) + step;
    ((&numbers * 5).remainder(11), numbers.remainder(3))
}

/// Losses and logits of some steps of SGD, and everything that is in the store afterwards.
fn trained<M>(model: &M, num_steps: i64) -> Result<(Vec<f64>, Vec<Tensor>)>
where
    M: Module<Input = Batch, Output = (Tensor, Tensor)>,
{
    let mut optimizer = Sgd::builder(model.params()).lr(0.1).momentum(0.9).build()?;
    set_seed(5);
    let (mut losses, mut kept) = (Vec::new(), Vec::new());
    for step in 0..num_steps {
        let (loss, logits) = model.forward(&batch(step, 8))?;
        backward(&[&loss], None, Default::default())?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(loss.f_double_value(&[])?);
        kept.push(logits.f_detach()?);
    }
    kept.extend(model.params().state_dict()?.iter().map(|(_, tensor)| tensor.detach().copy()));
    Ok((losses, kept))
}

fn assert_same(found: &(Vec<f64>, Vec<Tensor>), wanted: &(Vec<f64>, Vec<Tensor>)) {
    assert_eq!(found.0, wanted.0);
    assert_eq!(found.1.len(), wanted.1.len());
    for (index, (found, wanted)) in found.1.iter().zip(&wanted.1).enumerate() {
        assert!(found.equal(wanted), "tensor {index}: {found:?}");
    }
}

#[test]
fn it_says_that_its_passes_are_graphs() {
    let graphed = GraphedModule::with_recorder(model().unwrap(), StandIn::new(Fault::None));
    assert_eq!(graphed.compilation(), Compilation::CudaGraphs);
    // As every compiled model, it may be prepared where nobody asks for a compiler.
    Accelerator::builder().cpu(true).build().unwrap().prepare(graphed).unwrap();
}

#[test]
fn training_is_what_it_is_without_graphs() {
    let autocast = Autocast { device: Device::Cpu, kind: Kind::BFloat16, enabled: true, cache_enabled: true };
    for is_low in [false, true] {
        let _low = is_low.then(|| autocast.enter().unwrap());
        torch_ext::autocast::clear_autocast_cache().unwrap();
        torch_ext::autocast::set_cache_enabled(false);
        let wanted = trained(&model().unwrap(), 8).unwrap();
        torch_ext::autocast::set_cache_enabled(true);
        let recorder = StandIn::new(Fault::None);
        let graphed = GraphedModule::with_recorder(model().unwrap(), recorder.clone());
        assert_same(&trained(&graphed, 8).unwrap(), &wanted);
        assert_eq!((graphed.num_replays(), graphed.is_off()), (8, false));
        assert_eq!(recorder.num_recorded.load(Ordering::Relaxed), 2);
        // Both directions, of eight steps and of three comparisons.
        assert_eq!(recorder.num_replayed.load(Ordering::Relaxed), 2 * (8 + 3));
    }
}

#[test]
fn a_graph_that_goes_wrong_is_an_error_and_the_model_goes_on_without() {
    for (fault, step, words) in [
        (Fault::Forgets, 0, "output 0"),
        (Fault::ForgetsBackward, 0, "the gradient of embed.weight"),
        // The first comparison and the first step take four replays, so the second comparison finds it.
        (Fault::After(4), 1, "output 0"),
        (Fault::Refuses, 0, "waits for the host"),
    ] {
        let graphed = GraphedModule::with_recorder(model().unwrap(), StandIn::new(fault));
        for before in 0..step {
            graphed.forward(&batch(before, 8)).unwrap().0.backward();
        }
        let state =
            || graphed.params().state_dict().unwrap().iter().map(|(_, own)| own.detach().copy()).collect::<Vec<_>>();
        let (before, random) = (state(), torch_ext::Generator::default_cpu().unwrap().state().unwrap());
        let error = graphed.forward(&batch(step, 8)).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("graphs are off"), "{fault:?}: {error}");
        assert!(graphed.is_off());
        assert!(state().iter().zip(&before).all(|(found, wanted)| found.equal(wanted)), "{fault:?} left its mark");
        assert_eq!(torch_ext::Generator::default_cpu().unwrap().state().unwrap(), random, "{fault:?}");
        let replays = graphed.num_replays();
        graphed.forward(&batch(step + 1, 8)).unwrap().0.backward();
        assert_eq!(graphed.num_replays(), replays);
    }
}

#[test]
fn passes_that_would_read_overwritten_memory_are_errors() {
    let keep = BackwardOptions { retain_graph: true, ..Default::default() };
    let graphed = GraphedModule::with_recorder(model().unwrap(), StandIn::new(Fault::None));
    let (first, _) = graphed.forward(&batch(0, 8)).unwrap();
    let (second, _) = graphed.forward(&batch(1, 8)).unwrap();
    let error = backward(&[&first], None, keep).unwrap_err().to_string();
    assert!(error.contains("came after another forward pass"), "{error}");
    backward(&[&second], None, keep).unwrap();
    let error = backward(&[&second], None, keep).unwrap_err().to_string();
    assert!(error.contains("a second backward pass"), "{error}");
}

#[test]
fn what_the_caller_has_does_not_change_with_the_next_pass() {
    let graphed = GraphedModule::with_recorder(model().unwrap(), StandIn::new(Fault::None));
    let weight = graphed.params().get("head.weight").unwrap();
    let (loss, logits) = graphed.forward(&batch(0, 8)).unwrap();
    loss.backward();
    let gradient = weight.grad().unwrap();
    let copies = [&loss, &logits, &gradient].map(|own| own.detach().copy());
    let (next, _) = graphed.forward(&batch(4, 8)).unwrap();
    for (found, wanted) in [&loss, &logits, &gradient].into_iter().zip(&copies) {
        assert!(found.detach().equal(wanted));
    }
    next.backward();
    let sum = weight.grad().unwrap();
    assert!(sum.ne_tensor(&copies[2]).any().int64_value(&[]) == 1);
}

#[test]
fn gradients_of_several_passes_add_up() {
    fn accumulated(model: &impl Module<Input = Batch, Output = (Tensor, Tensor)>) -> Vec<Option<Tensor>> {
        set_seed(9);
        for step in [0, 4, 7] {
            model.forward(&batch(step, 8)).unwrap().0.backward();
        }
        model.params().parameters().iter().map(Param::grad).collect()
    }
    let graphed = GraphedModule::with_recorder(model().unwrap(), StandIn::new(Fault::None));
    let (found, wanted) = (accumulated(&graphed), accumulated(&model().unwrap()));
    assert_eq!(found.iter().flatten().count(), 5, "the weights of a layer that is not used have none");
    for (found, wanted) in found.iter().zip(&wanted) {
        assert_eq!(found.is_some(), wanted.is_some());
        assert!(found.as_ref().zip(wanted.as_ref()).is_none_or(|(found, wanted)| found.equal(wanted)));
    }
}

#[test]
fn other_passes_are_the_models_own_and_moved_parameters_are_recorded_anew() {
    let recorder = StandIn::new(Fault::None);
    let graphed = GraphedModule::with_recorder(model().unwrap(), recorder.clone());
    let num_recorded = || recorder.num_recorded.load(Ordering::Relaxed);
    graphed.params().eval();
    let _ = graphed.forward(&batch(0, 8)).unwrap();
    graphed.params().train();
    let _ = tch::no_grad(|| graphed.forward(&batch(0, 8))).unwrap();
    assert_eq!((graphed.num_replays(), num_recorded()), (0, 0));
    let _ = graphed.forward(&batch(0, 8)).unwrap();
    graphed.forward(&batch(0, 5)).unwrap().0.backward();
    assert_eq!((graphed.num_replays(), num_recorded()), (1, 2));
    let weight = graphed.params().get("head.weight").unwrap();
    weight.set_replicated(weight.get().unwrap().detach().copy()).unwrap();
    graphed.forward(&batch(0, 8)).unwrap().0.backward();
    assert_eq!((graphed.num_replays(), num_recorded()), (2, 4));
    assert!(weight.grad().is_some());
}

#[test]
fn results_that_are_not_finite_are_compared_with_nothing() {
    let recorder = StandIn::new(Fault::None);
    let graphed = GraphedModule::with_recorder(model().unwrap(), recorder.clone());
    let bias = graphed.params().get("head.bias").unwrap();
    bias.copy_(&Tensor::from(f64::INFINITY)).unwrap();
    for _ in 0..4 {
        let _ = graphed.forward(&batch(0, 8)).unwrap();
    }
    assert_eq!((graphed.num_replays(), graphed.is_off()), (0, false));
    bias.copy_(&Tensor::from(0.0)).unwrap();
    let _ = graphed.forward(&batch(0, 8)).unwrap();
    assert_eq!((graphed.num_replays(), recorder.num_recorded.load(Ordering::Relaxed)), (1, 2));
}

#[test]
fn parameters_without_a_place_of_their_own_are_refused_by_name() {
    let plugin = FullyShardedDataParallelPlugin::default();
    let accelerator = Accelerator::builder().cpu(true).fsdp_plugin(plugin).build().unwrap();
    let graphed = GraphedModule::with_recorder(model().unwrap(), StandIn::new(Fault::None));
    let optimizer = Sgd::new(graphed.params(), 0.1).unwrap();
    let (graphed, _optimizer) = accelerator.prepare((graphed, optimizer)).unwrap();
    let error = graphed.forward(&batch(0, 8)).unwrap_err().to_string();
    assert!(error.contains("embed.weight is sharded"), "{error}");
}

#[test]
fn there_are_no_graphs_of_a_cpu() {
    let error = GraphedModule::new(model().unwrap()).map(drop).unwrap_err().to_string();
    assert!(error.contains("the model is on Cpu"), "{error}");
}
