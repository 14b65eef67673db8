//! Stores whose requests Rust answers: what c10d asks arrives, and what Rust answers, errors and panics included.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tch::{Kind, Tensor};
use torch_ext::{Error, GlooOptions, ProcessGroup, ReduceOp, Result, Store, StoreBackend};

/// Passes everything on to a store of libtorch's, in the clear; counts its drops.
struct PassedOn(Store, Arc<AtomicUsize>);

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

impl StoreBackend for PassedOn {
    fn set(&self, key: &[u8], value: &[u8], _: Duration) -> Result<()> {
        self.0.set(text(key), value)
    }
    fn get(&self, key: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        match key {
            b"silent" => Err(Error::timeout("get", format!("nobody answered in {timeout:?}"))),
            b"gone" => Err(Error::connection("get", "the server is gone")),
            b"panics" => panic!("on purpose"),
            _ => self.0.with_timeout(timeout)?.get(text(key)),
        }
    }
    fn compare_set(&self, key: &[u8], expected: &[u8], desired: &[u8], _: Duration) -> Result<Vec<u8>> {
        self.0.compare_set(text(key), expected, desired)
    }
    fn append(&self, key: &[u8], value: &[u8], _: Duration) -> Result<()> {
        let present = if self.0.check(&[text(key)])? { self.0.get(text(key))? } else { Vec::new() };
        self.0.set(text(key), &[&present, value].concat())
    }
    fn add(&self, key: &[u8], amount: i64, _: Duration) -> Result<i64> {
        self.0.add(text(key), amount)
    }
    fn delete_key(&self, key: &[u8], _: Duration) -> Result<bool> {
        self.0.delete_key(text(key))
    }
    fn num_keys(&self, _: Duration) -> Result<i64> {
        self.0.num_keys()
    }
    fn check(&self, keys: &[&[u8]], _: Duration) -> Result<bool> {
        self.0.check(&keys.iter().map(|key| text(key)).collect::<Vec<_>>())
    }
    fn wait(&self, keys: &[&[u8]], timeout: Duration) -> Result<()> {
        self.0.wait(&keys.iter().map(|key| text(key)).collect::<Vec<_>>(), timeout)
    }
}

fn store() -> (Store, Arc<AtomicUsize>) {
    let drops = Arc::new(AtomicUsize::new(0));
    let backend = PassedOn(Store::hash().unwrap(), Arc::clone(&drops));
    (Store::from_backend(backend, Duration::from_secs(60)).unwrap(), drops)
}

impl Drop for PassedOn {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn every_request_arrives() {
    let (whole, drops) = store();
    let store = whole.prefix("run").unwrap();
    drop(whole);
    store.set("a", b"1").unwrap();
    store.set("empty", b"").unwrap();
    assert_eq!((store.get("a").unwrap(), store.get("empty").unwrap()), (b"1".to_vec(), vec![]));
    assert_eq!(store.add("count", 3).unwrap(), 3);
    assert_eq!(store.add("count", -5).unwrap(), -2);
    store.append("a", b"2").unwrap();
    assert_eq!(store.compare_set("a", b"12", b"ab").unwrap(), b"ab");
    assert!(store.check(&["a", "count"]).unwrap() && !store.check(&["a", "b"]).unwrap());
    assert_eq!(store.num_keys().unwrap(), 3);
    assert!(store.delete_key("a").unwrap() && !store.delete_key("a").unwrap());
    store.wait(&["count"], Duration::from_millis(1)).unwrap();
    assert!(store.wait(&["never"], Duration::from_millis(1)).unwrap_err().is_timeout());
    assert_eq!(drops.load(Ordering::Relaxed), 0);
    drop(store);
    assert_eq!(drops.load(Ordering::Relaxed), 1);
}

#[test]
fn failures_keep_their_kind_and_panics_stay_on_this_side() {
    let (store, _) = store();
    let hurried = store.with_timeout(Duration::from_millis(7)).unwrap();
    let error = hurried.get("silent").unwrap_err();
    assert!(error.is_timeout() && error.message() == "nobody answered in 7ms", "{error}");
    let error = store.get("silent").unwrap_err();
    assert!(error.message() == "nobody answered in 60s", "{error}");
    let error = store.get("gone").unwrap_err();
    assert!(error.is_connection() && error.message() == "the server is gone", "{error}");
    let error = store.get("panics").unwrap_err();
    assert!(error.message().contains("the backend of the store panicked"), "{error}");
    assert!(hurried.get("never").unwrap_err().is_timeout());
}

#[test]
fn ranks_meet_through_it() {
    for world_size in 1..=3 {
        let (store, drops) = store();
        std::thread::scope(|scope| {
            for rank in 0..world_size {
                let store = store.clone();
                scope.spawn(move || {
                    let group = ProcessGroup::gloo(&store, rank, world_size, &GlooOptions::default()).unwrap();
                    let sum = Tensor::from(rank as f32 + 1.0);
                    group.all_reduce(&sum, ReduceOp::Sum, None).unwrap().wait(None).unwrap();
                    assert_eq!(sum.sum(Kind::Float).double_value(&[]), (world_size * (world_size + 1) / 2) as f64);
                });
            }
        });
        drop(store);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    }
}
