//! Optimizers whose state is kept off the device: the same numbers to the bit, whatever moves.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Init, ParamStore};
use accelerate::optim::{Adagrad, Adam, AdamW, Lion, Optimizer, OptimizerState, ParamGroup, RMSprop, Sgd, no_decay};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{OffloadTarget, Result};
use tempfile::TempDir;

/// More than one block, a type of half the size, one of twice, single numbers.
const PARAMETERS: [(&str, &[i64], Kind); 6] = [
    ("table.weight", &[1300, 1001], Kind::Float),
    ("table.bias", &[7], Kind::Float),
    ("half.weight", &[33, 5], Kind::BFloat16),
    ("double.weight", &[3, 11], Kind::Double),
    ("scale.bias", &[], Kind::Float),
    ("nothing.weight", &[0, 3], Kind::Float),
];

fn values(shape: &[i64], kind: Kind, seed: i64) -> Tensor {
    let numel: i64 = shape.iter().product();
    let numbers = Tensor::arange(numel, (Kind::Double, Device::Cpu)) * 0.37 + seed as f64 * 1.7;
    numbers.sin().to_kind(kind).reshape(shape)
}

fn store() -> ParamStore {
    let store = ParamStore::new(Device::Cpu);
    for (seed, (name, shape, kind)) in PARAMETERS.iter().enumerate() {
        let (path, leaf) = name.split_once('.').unwrap();
        let param = (store.root() / path).param(leaf, Tensor::zeros(*shape, (*kind, Device::Cpu))).unwrap();
        param.copy_(&values(shape, *kind, seed as i64)).unwrap();
    }
    store
}

type Maker = fn(&ParamStore) -> Result<Box<dyn Optimizer>>;

fn adamw(store: &ParamStore) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(AdamW::builder(store).lr(0.01).param_groups(no_decay(store, &["bias"])).build()?))
}

fn adam_amsgrad(store: &ParamStore) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(Adam::builder(store).lr(0.01).weight_decay(0.1).amsgrad(true).build()?))
}

fn adagrad(store: &ParamStore) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(Adagrad::builder(store).lr(0.01).lr_decay(0.1).initial_accumulator_value(0.5).build()?))
}

fn lion(store: &ParamStore) -> Result<Box<dyn Optimizer>> {
    let [first, second]: [ParamGroup; 2] = no_decay(store, &["bias"]).try_into().unwrap();
    Ok(Box::new(Lion::builder(store).lr(0.01).param_groups(vec![first.weight_decay(0.1), second.lr(0.1)]).build()?))
}

const MAKERS: [Maker; 4] = [adamw, adam_amsgrad, adagrad, lion];

/// One step; some parameters have no gradient in some of them.
fn step(store: &ParamStore, optimizer: &mut dyn Optimizer, number: i64, found_inf: Option<f32>) -> Result<()> {
    for (position, param) in store.parameters().iter().enumerate() {
        if (number + position as i64) % 3 != 1 {
            let gradient = values(&param.shape(), param.kind(), 100 * number + position as i64);
            (param.get().unwrap() * gradient).sum(Kind::Double).backward();
        }
    }
    match found_inf {
        Some(found) => optimizer.step_unless(&Tensor::from(found))?,
        None if number == 2 => optimizer.step_with_factor(0.25)?,
        None => optimizer.step()?,
    }
    optimizer.zero_grad()
}

fn assert_same(found: &OptimizerState, wanted: &OptimizerState) {
    assert_eq!(found.groups, wanted.groups);
    assert_eq!(found.tensors.keys().collect::<Vec<_>>(), wanted.tensors.keys().collect::<Vec<_>>());
    for (key, tensor) in &found.tensors {
        let wanted = &wanted.tensors[key];
        assert_eq!((tensor.kind(), tensor.size()), (wanted.kind(), wanted.size()), "{key}");
        assert!(tensor.equal(wanted), "{key}");
    }
}

fn assert_same_parameters(found: &ParamStore, wanted: &ParamStore) {
    for (found, wanted) in found.parameters().iter().zip(wanted.parameters()) {
        assert!(found.get().unwrap().equal(&wanted.get().unwrap()), "{}", found.name());
    }
}

fn targets() -> (TempDir, [OffloadTarget; 2]) {
    let folder = tempfile::tempdir().unwrap();
    let targets = [OffloadTarget::Nvme(folder.path().to_owned()), OffloadTarget::Cpu];
    (folder, targets)
}

#[test]
fn every_step_and_all_state_are_the_same_to_the_bit() {
    let (_folder, targets) = targets();
    for make in MAKERS {
        for target in &targets {
            let (here, there) = (store(), store());
            let (mut kept, mut offloaded) = (make(&here).unwrap(), make(&there).unwrap());
            offloaded.offload_state(target).unwrap();
            assert!(offloaded.is_state_offloaded() && !kept.is_state_offloaded());
            for number in 0..5 {
                let found_inf = [None, None, None, Some(1.0), Some(0.0)][number as usize];
                step(&here, &mut *kept, number, found_inf).unwrap();
                step(&there, &mut *offloaded, number, found_inf).unwrap();
                assert_same(&offloaded.state_dict().unwrap(), &kept.state_dict().unwrap());
                assert_same_parameters(&there, &here);
                assert_eq!(offloaded.handle().num_steps(), kept.handle().num_steps());
            }
        }
    }
}

#[test]
fn state_moves_out_in_the_middle_and_loads_from_either() {
    let (_folder, targets) = targets();
    for make in MAKERS {
        for target in &targets {
            let (here, there, third) = (store(), store(), store());
            let mut kept = make(&here).unwrap();
            let mut moved = make(&there).unwrap();
            let mut loaded = make(&third).unwrap();
            loaded.offload_state(target).unwrap();
            for number in 0..1 {
                step(&here, &mut *kept, number, None).unwrap();
                step(&there, &mut *moved, number, None).unwrap();
            }
            moved.offload_state(target).unwrap();
            // State that was there before goes.
            step(&third, &mut *loaded, 7, None).unwrap();
            loaded.load_state_dict(&kept.state_dict().unwrap()).unwrap();
            third.load_state_dict(&here.state_dict().unwrap(), Default::default()).unwrap();
            for number in 1..4 {
                for (store, optimizer) in [(&here, &mut kept), (&there, &mut moved), (&third, &mut loaded)] {
                    step(store, &mut **optimizer, number, None).unwrap();
                }
            }
            for (store, optimizer) in [(&there, &moved), (&third, &loaded)] {
                assert_same_parameters(store, &here);
                assert_same(&optimizer.state_dict().unwrap(), &kept.state_dict().unwrap());
            }
            // And back into memory.
            kept.load_state_dict(&moved.state_dict().unwrap()).unwrap();
            assert_same(&kept.state_dict().unwrap(), &moved.state_dict().unwrap());
        }
    }
}

#[test]
fn a_state_that_does_not_fit_changes_nothing() {
    let (_folder, targets) = targets();
    let (first, second) = (store(), store());
    let mut optimizer = adamw(&first).unwrap();
    optimizer.offload_state(&targets[0]).unwrap();
    step(&first, &mut *optimizer, 0, None).unwrap();
    let before = optimizer.state_dict().unwrap();
    let mut other = adam_amsgrad(&second).unwrap();
    step(&second, &mut *other, 0, None).unwrap();
    let error = optimizer.load_state_dict(&other.state_dict().unwrap()).unwrap_err().to_string();
    assert!(error.contains("parameter groups") && error.contains("Nothing was loaded"), "{error}");
    assert_same(&optimizer.state_dict().unwrap(), &before);
}

#[test]
fn optimizers_that_cannot_say_so() {
    let store = store();
    let optimizers: [Box<dyn Optimizer>; 2] =
        [Box::new(Sgd::new(&store, 0.1).unwrap()), Box::new(RMSprop::new(&store, 0.1).unwrap())];
    for mut optimizer in optimizers {
        let error = optimizer.offload_state(&OffloadTarget::Cpu).unwrap_err().to_string();
        let name = optimizer.handle().optimizer_name();
        assert!(error.contains(name) && error.contains("AdamW, Adagrad, Lion"), "{error}");
        assert!(!optimizer.is_state_offloaded());
    }
}

#[test]
fn without_a_folder_or_room_state_stays_where_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let store = ParamStore::new(Device::Cpu);
    store.root().param("weight", ([4], Init::Ones)).unwrap();
    let mut optimizer = AdamW::new(&store, 0.1).unwrap();
    let step = |optimizer: &mut AdamW| {
        store.parameters()[0].get().unwrap().sum(None).backward();
        optimizer.step()
    };
    step(&mut optimizer).unwrap();
    let before = optimizer.state_dict().unwrap();
    let missing = folder.path().join("not").join("mounted");
    let error = optimizer.offload_state(&OffloadTarget::Nvme(missing.clone())).unwrap_err().to_string();
    assert!(error.contains(&*missing.to_string_lossy()), "{error}");
    assert!(!optimizer.is_state_offloaded());
    assert_same(&optimizer.state_dict().unwrap(), &before);
    step(&mut optimizer).unwrap();

    // Without state the folder is first needed in a step.
    let mut optimizer = AdamW::new(&store, 0.1).unwrap();
    optimizer.offload_state(&OffloadTarget::Nvme(missing.clone())).unwrap();
    let weight = store.parameters()[0].get().unwrap().copy();
    assert!(step(&mut optimizer).unwrap_err().to_string().contains("mount"));
    assert!(store.parameters()[0].get().unwrap().equal(&weight), "nothing was updated");
    std::fs::create_dir_all(&missing).unwrap();
    step(&mut optimizer).unwrap();
}
