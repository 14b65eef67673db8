//! The road to sharded weights: three units of two parameters each, every parameter stored as two halves.
//!
//! A unit's weights are gathered by one custom function with two outputs whose backward is the reduce-scatter.
//! Saved-tensor hooks replace a gathered weight in the graph by a token, so that its memory goes after its last
//! use in the forward pass and comes back, by one more gather per unit, when the backward pass first needs it.
//! The halves stand for the shards of two ranks that hold the same values: a gather is a `cat`, a reduce-scatter
//! the sum of the gradient's halves.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Device, Kind, Tensor};
use torch_ext::autograd::{self, CallbackResult, gradient_of};
use torch_ext::saved_tensors::{Packed, SavedTensorHooks, SavedToken, with_saved_tensor_hooks};
use torch_ext::storage::{WeakStorage, storage_id, storage_offset};
use torch_ext::{Result, apply_function};

const NUM_UNITS: usize = 3;
const WIDTH: i64 = 32;

#[derive(Default)]
struct Unit {
    shards: Vec<Tensor>,
    full: Vec<Tensor>,
    tokens: usize,
    gathers: usize,
    reduce_scatters: usize,
    /// Every gathered storage that ever was.
    storages: Vec<WeakStorage>,
}

#[derive(Default)]
struct World {
    units: Vec<Unit>,
    /// Storage of a gathered weight -> (unit, index in the unit).
    live: HashMap<usize, (usize, usize)>,
    in_backward: bool,
}

impl World {
    fn gather(&mut self, unit: usize) -> Vec<Tensor> {
        let World { units, live, .. } = self;
        let state = &mut units[unit];
        if state.full.is_empty() {
            let _no_grad = tch::no_grad_guard();
            state.gathers += 1;
            for (index, shard) in state.shards.iter().enumerate() {
                let full = gathered(&shard.detach());
                live.insert(storage_id(&full), (unit, index));
                state.storages.push(WeakStorage::new(&full));
                state.full.push(full);
            }
        }
        state.full.iter().map(Tensor::shallow_clone).collect()
    }

    fn release(&mut self, unit: usize) {
        for full in self.units[unit].full.drain(..) {
            self.live.remove(&storage_id(&full));
        }
    }
}

#[derive(Clone)]
struct Shared(Arc<Mutex<World>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The full weights of a unit, as outputs of one node.
    fn full_weights(&self, unit: usize) -> Result<Vec<Tensor>> {
        let shards: Vec<Tensor> = self.lock().units[unit].shards.iter().map(Tensor::shallow_clone).collect();
        let world = self.clone();
        apply_function(
            "GatherUnit",
            &shards.iter().collect::<Vec<_>>(),
            |_| Ok(self.lock().gather(unit)),
            move |_, gradients| {
                world.lock().units[unit].reduce_scatters += 1;
                Ok(gradients.into_iter().map(|gradient| gradient.as_ref().map(reduce_scattered)).collect())
            },
        )
    }
}

fn gathered(shard: &Tensor) -> Tensor {
    Tensor::cat(&[shard, shard], 0)
}

fn reduce_scattered(gradient: &Tensor) -> Tensor {
    let halves = gradient.chunk(2, 0);
    &halves[0] + &halves[1]
}

impl SavedTensorHooks for Shared {
    fn pack(&self, tensor: &Tensor) -> Packed {
        let mut world = self.lock();
        let Some(&(unit, index)) = world.live.get(&storage_id(tensor)) else {
            return Packed::Keep;
        };
        world.units[unit].tokens += 1;
        Packed::Token(Box::new(Token {
            world: self.clone(),
            unit,
            index,
            sizes: tensor.size(),
            strides: tensor.stride(),
            offset: storage_offset(tensor),
        }))
    }
}

struct Token {
    world: Shared,
    unit: usize,
    index: usize,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    offset: i64,
}

impl SavedToken for Token {
    fn unpack(&self) -> CallbackResult<Tensor> {
        let full = self.world.lock().gather(self.unit);
        Ok(full[self.index].f_as_strided(&self.sizes[..], &self.strides[..], self.offset)?)
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        let mut world = self.world.lock();
        world.units[self.unit].tokens -= 1;
        if world.in_backward && world.units[self.unit].tokens == 0 {
            world.release(self.unit);
        }
    }
}

fn layer(x: &Tensor, weights: &[Tensor]) -> Tensor {
    x.linear(&weights[0], None::<&Tensor>).gelu("none").linear(&weights[1], None::<&Tensor>)
}

fn new_shards() -> Vec<Vec<Tensor>> {
    tch::manual_seed(0);
    let shard = || (Tensor::randn([WIDTH / 2, WIDTH], (Kind::Float, Device::Cpu)) * 0.1).set_requires_grad(true);
    (0..NUM_UNITS).map(|_| vec![shard(), shard()]).collect()
}

fn gradients(shards: &[Vec<Tensor>]) -> Vec<Tensor> {
    shards.iter().flatten().map(|shard| gradient_of(shard).unwrap().unwrap()).collect()
}

/// The same computation with whole weights in the graph.
fn plain_gradients(x: &Tensor) -> Vec<Tensor> {
    let shards = new_shards();
    let output = shards.iter().fold(x.shallow_clone(), |x, unit| {
        // Detached, so that the sum of the two halves is ours and not that of `cat`.
        let weights: Vec<Tensor> = unit
            .iter()
            .map(|shard| {
                apply_function(
                    "Gather",
                    &[shard],
                    |_| Ok(vec![gathered(shard)]),
                    |_, gradients| Ok(vec![gradients[0].as_ref().map(reduce_scattered)]),
                )
                .unwrap()
                .remove(0)
            })
            .collect();
        layer(&x, &weights)
    });
    autograd::backward(&[&output.square().sum(Kind::Float)], None, Default::default()).unwrap();
    gradients(&shards)
}

#[test]
fn weights_are_gathered_twice_and_freed_in_between() {
    let shards = new_shards();
    let x = Tensor::randn([4, WIDTH], (Kind::Float, Device::Cpu));
    let world = Shared(Arc::default());
    world.lock().units = shards
        .iter()
        .map(|unit| Unit { shards: unit.iter().map(Tensor::shallow_clone).collect(), ..Unit::default() })
        .collect();

    let loss = with_saved_tensor_hooks(Rc::new(world.clone()), || {
        let mut x = x.shallow_clone();
        for unit in 0..NUM_UNITS {
            let weights = world.full_weights(unit).unwrap();
            if unit > 0 {
                world.lock().release(unit - 1);
                let state = world.lock();
                assert!(
                    state.units[unit - 1].storages.iter().all(|storage| !storage.is_alive()),
                    "unit {} must be freed once the next one is used",
                    unit - 1
                );
            }
            x = layer(&x, &weights);
        }
        world.lock().release(NUM_UNITS - 1);
        x.square().sum(Kind::Float)
    })
    .unwrap();
    for (index, unit) in world.lock().units.iter().enumerate() {
        // The input needs no gradient, so the very first product does not save its weight.
        let num_saved = if index == 0 { 1 } else { 2 };
        assert_eq!((unit.gathers, unit.tokens), (1, num_saved), "one gather and one token per saved weight");
        assert!(unit.storages.iter().all(|storage| !storage.is_alive()), "the graph must not hold gathered weights");
    }

    world.lock().in_backward = true;
    autograd::backward(&[&loss], None, Default::default()).unwrap();
    for unit in &world.lock().units {
        assert_eq!((unit.gathers, unit.reduce_scatters, unit.tokens), (2, 1, 0));
        assert!(
            unit.storages.iter().all(|storage| !storage.is_alive()),
            "everything must be freed after the backward pass"
        );
        assert!(unit.full.is_empty());
    }

    for (ours, plain) in gradients(&shards).iter().zip(plain_gradients(&x)) {
        assert_eq!(ours, &plain, "gradients must be equal to the last bit");
    }
}
