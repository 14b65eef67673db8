//! Storages that are freed and allocated under living tensors, and meta tensors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use tch::{Device, Kind, Tensor};
use torch_ext::foreach;
use torch_ext::meta::{empty_meta, is_meta, to_meta};
use torch_ext::storage::{
    CopyMode, WeakStorage, add_and_copy_floats, allocate_storage, copy_bytes, free_storage, is_allocated,
    storage_bytes, storage_id,
};

fn ones(shape: &[i64]) -> Tensor {
    Tensor::ones(shape, (Kind::Float, Device::Cpu))
}

#[test]
fn identity_follows_the_storage() {
    let x = ones(&[4, 4]);
    for same in [x.shallow_clone(), x.detach(), x.narrow(0, 1, 2), x.tr(), x.view([16])] {
        assert_eq!(storage_id(&same), storage_id(&x));
    }
    for other in [x.copy(), ones(&[4, 4]), &x + 0.0] {
        assert_ne!(storage_id(&other), storage_id(&x));
    }
    assert_eq!(storage_id(&Tensor::new()), 0);
}

#[test]
fn bytes_are_those_of_the_whole_storage() {
    for (kind, size) in [(Kind::Float, 4), (Kind::Double, 8), (Kind::BFloat16, 2), (Kind::Bool, 1)] {
        let x = Tensor::zeros([10], (kind, Device::Cpu));
        assert_eq!(storage_bytes(&x).unwrap(), 10 * size);
        assert_eq!(storage_bytes(&x.narrow(0, 3, 2)).unwrap(), 10 * size);
    }
    assert!(storage_bytes(&Tensor::new()).unwrap_err().is_invalid_argument());
}

#[test]
fn freeing_takes_the_memory_and_leaves_the_shape() {
    let x = ones(&[3, 5]);
    let view = x.narrow(1, 2, 2);
    free_storage(&view).unwrap();
    free_storage(&x).unwrap();
    assert_eq!((x.size(), x.stride(), view.size()), (vec![3, 5], vec![5, 1], vec![3, 2]));
    assert_eq!(storage_bytes(&x).unwrap(), 0);
    assert!(!is_allocated(&x) && !is_allocated(&view));
    assert_eq!(storage_id(&x), storage_id(&view));
}

#[test]
fn using_freed_data_is_an_error_and_not_a_crash() {
    let mut x = ones(&[3, 5]);
    let (view, transposed) = (x.narrow(0, 1, 1), x.tr());
    free_storage(&x).unwrap();
    let results = [
        ("add", x.f_add(&x)),
        ("sum", x.f_sum(Kind::Float)),
        ("matmul", x.f_matmul(&ones(&[5, 2]))),
        ("copy", x.f_detach_copy()),
        ("view", view.f_exp()),
        ("write", x.f_zero_()),
        ("gather", transposed.f_contiguous()),
        ("as right side", ones(&[5, 5]).narrow(0, 0, 3).f_add(&x)),
    ];
    for (name, result) in results {
        let error = result.map(|_| ()).expect_err(name).to_string();
        assert!(error.contains("was freed by free_storage"), "{name}: {error}");
    }
    // New views are refused by libtorch's own check of bounds.
    let error = x.f_tr().map(|_| ()).expect_err("view").to_string();
    assert!(error.contains("out of bounds for storage of size 0"), "{error}");
}

#[test]
fn allocated_storage_works_like_new() {
    let x = ones(&[3, 5]).set_requires_grad(true);
    let view = x.detach().narrow(0, 2, 1);
    for round in 1..4 {
        free_storage(&x).unwrap();
        allocate_storage(&x, 60).unwrap();
        assert!(is_allocated(&view));
        foreach::zero_(&[&x]).unwrap();
        foreach::add_scalar_(&[&x], f64::from(round)).unwrap();
        assert_eq!(view.double_value(&[0, 4]), f64::from(round));
    }
    let loss = (&x * 2.0).sum(Kind::Float);
    torch_ext::autograd::backward(&[&loss], None, Default::default()).unwrap();
}

#[test]
fn allocation_is_refused_where_it_would_be_wrong() {
    let x = ones(&[10]);
    let error = allocate_storage(&x, 40).unwrap_err();
    assert!(error.is_invalid_argument() && error.message().contains("still holds 40 bytes"), "{error}");
    let part = x.narrow(0, 0, 2);
    free_storage(&part).unwrap();
    let error = allocate_storage(&part, 8).unwrap_err();
    assert!(error.is_invalid_argument() && error.message().contains("address 40 bytes"), "{error}");
    assert!(!is_allocated(&x));
    allocate_storage(&part, 64).unwrap();
    assert_eq!(storage_bytes(&x).unwrap(), 64);
}

#[test]
fn memory_of_others_is_not_freed() {
    let lent = [1f32, 2.0];
    // SAFETY: `lent` outlives the tensor.
    let x = unsafe { Tensor::from_blob(lent.as_ptr().cast(), &[2], &[1], Kind::Float, Device::Cpu) };
    let error = free_storage(&x).unwrap_err();
    assert!(error.is_invalid_argument() && error.message().contains("does not own"), "{error}");
    assert_eq!(x.double_value(&[1]), 2.0);
    for wrong in [Tensor::new(), empty_meta(&[2], Kind::Float).unwrap()] {
        assert!(free_storage(&wrong).unwrap_err().is_invalid_argument());
        assert!(!is_allocated(&wrong));
    }
}

#[test]
fn a_freed_storage_can_be_dropped_and_replaced() {
    let x = ones(&[1000]);
    let weak = WeakStorage::new(&x);
    free_storage(&x).unwrap();
    assert!(weak.is_alive(), "the storage is empty, not gone");
    drop(x);
    assert!(!weak.is_alive());
    assert!(!WeakStorage::new(&Tensor::new()).is_alive());
}

#[test]
fn empty_tensors_survive() {
    let x = ones(&[0, 3]);
    free_storage(&x).unwrap();
    assert!(!is_allocated(&x));
    allocate_storage(&x, 0).unwrap();
    assert!(is_allocated(&x));
}

#[test]
fn meta_tensors_have_shapes_and_no_memory() {
    let x = empty_meta(&[2, 3], Kind::BFloat16).unwrap();
    assert!(is_meta(&x) && !is_allocated(&x));
    assert_eq!((x.size(), x.kind()), (vec![2, 3], Kind::BFloat16));
    assert_eq!(x.f_matmul(&empty_meta(&[3, 7], Kind::BFloat16).unwrap()).unwrap().size(), [2, 7]);
    let transposed = to_meta(&ones(&[4, 2]).tr()).unwrap();
    assert_eq!((transposed.size(), transposed.stride()), (vec![2, 4], vec![1, 2]));
    assert!(!is_meta(&ones(&[1])) && !is_meta(&Tensor::new()));
    assert!(empty_meta(&[-1], Kind::Float).is_err());
    assert!(to_meta(&Tensor::new()).is_err());
}

#[test]
fn bytes_that_are_not_there_or_are_the_same_ones_are_not_copied() {
    let (x, y) = (ones(&[16]), ones(&[16]));
    let gaps = ones(&[4, 4]).tr();
    for (from, to, num_bytes) in [
        ((&x, 0), (&y, 0), 65),
        ((&x, 61), (&y, 0), 4),
        ((&x, 0), (&y, 61), 4),
        ((&x, usize::MAX), (&y, 0), 4),
        ((&x, 0), (&y, 0), usize::MAX),
        ((&gaps, 0), (&y, 0), 4),
        ((&x, 0), (&gaps, 0), 4),
        ((&x, 0), (&x, 8), 12),
        ((&x, 8), (&x, 0), 12),
    ] {
        let error = copy_bytes(from, to, num_bytes, CopyMode::NonTemporal).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        let sum = add_and_copy_floats(from, to, (&ones(&[16]), 0), num_bytes / 4 + 1, CopyMode::Cached);
        assert_eq!(sum.unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    }
    copy_bytes((&x, 0), (&x, 32), 32, CopyMode::Cached).unwrap();
    assert_eq!((x, y), (ones(&[16]), ones(&[16])));
}
