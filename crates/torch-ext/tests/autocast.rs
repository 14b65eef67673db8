//! Autocast scopes: what is cast, and that every setting comes back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use tch::{Device, Kind, Tensor};
use torch_ext::Autocast;
use torch_ext::autocast::{
    autocast_dtype, clear_autocast_cache, is_autocast_enabled, is_cache_enabled, set_cache_enabled,
};
use torch_ext::storage::WeakStorage;

const CPU: Device = Device::Cpu;

fn autocast(kind: Kind) -> Autocast {
    Autocast { device: CPU, kind, enabled: true, cache_enabled: true }
}

fn matrix() -> Tensor {
    Tensor::ones([4, 4], (Kind::Float, CPU))
}

#[test]
fn matrix_products_are_cast_and_sums_are_not() {
    for kind in [Kind::BFloat16, Kind::Half] {
        let x = matrix();
        let (product, norm) = autocast(kind).run(|| (x.matmul(&x), x.to_kind(kind).softmax(0, None))).unwrap();
        assert_eq!(product.kind(), kind);
        assert_eq!(norm.size(), [4, 4]);
        assert_eq!(x.matmul(&x).kind(), Kind::Float);
    }
}

#[test]
fn scopes_nest_and_restore() {
    let x = matrix();
    let kinds = || (x.matmul(&x).kind(), is_autocast_enabled(CPU).unwrap(), autocast_dtype(CPU).unwrap());
    let before = kinds();
    let outer = autocast(Kind::Half).enter().unwrap();
    assert_eq!(kinds(), (Kind::Half, true, Kind::Half));
    {
        let _inner = Autocast { enabled: false, ..autocast(Kind::BFloat16) }.enter().unwrap();
        assert_eq!(kinds(), (Kind::Float, false, Kind::BFloat16));
        let _innermost = autocast(Kind::BFloat16).enter().unwrap();
        assert_eq!(kinds(), (Kind::BFloat16, true, Kind::BFloat16));
    }
    assert_eq!(kinds(), (Kind::Half, true, Kind::Half));
    drop(outer);
    assert_eq!(kinds(), before);
}

#[test]
fn a_panic_inside_ends_the_scope() {
    let result = std::panic::catch_unwind(|| autocast(Kind::BFloat16).run(|| panic!("inside")));
    assert!(result.is_err());
    assert!(!is_autocast_enabled(CPU).unwrap());
}

#[test]
fn scopes_belong_to_their_thread() {
    let _scope = autocast(Kind::BFloat16).enter().unwrap();
    let other = std::thread::spawn(|| is_autocast_enabled(CPU).unwrap()).join().unwrap();
    assert!(!other);
}

#[test]
fn other_devices_have_settings_of_their_own() {
    let cuda = Device::Cuda(0);
    let _scope = Autocast { device: cuda, ..autocast(Kind::BFloat16) }.enter().unwrap();
    assert!(is_autocast_enabled(cuda).unwrap() && !is_autocast_enabled(CPU).unwrap());
    assert_eq!(autocast_dtype(cuda).unwrap(), Kind::BFloat16);
}

#[test]
fn kinds_that_make_no_sense_are_refused() {
    for kind in [Kind::Float, Kind::Int64, Kind::Float8e4m3fn] {
        let error = autocast(kind).enter().unwrap_err();
        assert!(error.is_invalid_argument() && error.message().contains("Half or BFloat16"), "{error}");
        assert!(!is_autocast_enabled(CPU).unwrap());
    }
    // Turned off, the kind does not matter.
    let _off = Autocast { enabled: false, ..autocast(Kind::Float) }.enter().unwrap();
}

fn fill(weight: &Tensor, value: f64) {
    tch::no_grad(|| {
        let _ = weight.shallow_clone().fill_(value);
    });
}

/// Whether a product uses a cast copy of `weight` from before: writing to the weight behind the cache's back tells.
fn uses_old_copy(weight: &Tensor, x: &Tensor) -> bool {
    let old = x.matmul(weight);
    fill(weight, 2.0);
    let new = x.matmul(weight);
    fill(weight, 1.0);
    old == new
}

#[test]
fn the_cache_keeps_cast_weights_until_it_is_cleared() {
    let x = matrix();
    for (cache_enabled, expected) in [(true, true), (false, false)] {
        let weight = matrix().set_requires_grad(true);
        let _scope = Autocast { cache_enabled, ..autocast(Kind::BFloat16) }.enter().unwrap();
        assert_eq!(is_cache_enabled(), cache_enabled);
        assert_eq!(uses_old_copy(&weight, &x), expected);
    }
    assert!(is_cache_enabled());

    let weight = matrix().set_requires_grad(true);
    let _scope = autocast(Kind::BFloat16).enter().unwrap();
    let old = x.matmul(&weight);
    fill(&weight, 2.0);
    clear_autocast_cache().unwrap();
    assert_ne!(old, x.matmul(&weight), "a cleared cache must cast anew");
}

#[test]
fn the_outermost_scope_clears_the_cache_and_inner_ones_do_not() {
    let x = matrix();
    let weight = matrix().set_requires_grad(true);
    let watch = WeakStorage::new(&weight);
    {
        let _outer = autocast(Kind::BFloat16).enter().unwrap();
        let old = x.matmul(&weight);
        fill(&weight, 2.0);
        autocast(Kind::BFloat16).run(|| ()).unwrap();
        assert_eq!(old, x.matmul(&weight), "the inner scope must not clear the cache");
    }
    let fresh = autocast(Kind::BFloat16).run(|| x.matmul(&weight)).unwrap();
    assert_eq!(fresh.double_value(&[0, 0]), 8.0, "a new scope must not see the old cast copy");
    drop((fresh, weight));
    assert!(!watch.is_alive(), "the cache must not keep weights alive");
}

#[test]
fn the_cache_switch_outside_of_scopes() {
    set_cache_enabled(false);
    assert!(!is_cache_enabled());
    autocast(Kind::BFloat16).run(|| assert!(is_cache_enabled())).unwrap();
    assert!(!is_cache_enabled());
    set_cache_enabled(true);
}
