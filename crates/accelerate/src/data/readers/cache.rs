//! What was decoded lately.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Values that take long to make, the lately used ones kept up to a budget of bytes.
///
/// Threads that want the same value wait for the first of them to make it; those that want others do not.
#[derive(Debug)]
pub(super) struct Cache<V> {
    budget_bytes: u64,
    /// The last used one first.
    entries: Mutex<Vec<Entry<V>>>,
}

#[derive(Debug)]
struct Entry<V> {
    key: usize,
    num_bytes: u64,
    value: Arc<Mutex<Option<Arc<V>>>>,
}

impl<V> Cache<V> {
    pub(super) fn new(budget_bytes: u64) -> Self {
        Self { budget_bytes, entries: Mutex::new(Vec::new()) }
    }

    /// The value for `key`, which is thought to take `num_bytes`; `make` says how many it takes indeed. What it refuses to
    /// make is tried again the next time.
    pub(super) fn get<E>(
        &self,
        key: usize,
        num_bytes: u64,
        make: impl FnOnce() -> Result<(V, u64), E>,
    ) -> Result<Arc<V>, E> {
        let value = self.entry(key, num_bytes);
        let mut value = lock(&value);
        if let Some(value) = &*value {
            return Ok(Arc::clone(value));
        }
        let (made, made_bytes) = make()?;
        let made = Arc::new(made);
        *value = Some(Arc::clone(&made));
        if made_bytes != num_bytes {
            // Nobody waits for a value while holding the list, so this lock inside of the value's cannot deadlock.
            let mut entries = lock(&self.entries);
            entries.iter_mut().filter(|entry| entry.key == key).for_each(|entry| entry.num_bytes = made_bytes);
            self.shrink(&mut entries);
        }
        Ok(made)
    }

    fn entry(&self, key: usize, num_bytes: u64) -> Arc<Mutex<Option<Arc<V>>>> {
        let mut entries = lock(&self.entries);
        let entry = match entries.iter().position(|entry| entry.key == key) {
            Some(position) => entries.remove(position),
            None => Entry { key, num_bytes, value: Arc::default() },
        };
        let value = Arc::clone(&entry.value);
        entries.insert(0, entry);
        self.shrink(&mut entries);
        value
    }

    /// Forgets what was used longest ago, until the rest fits; the last used one stays in any case.
    fn shrink(&self, entries: &mut Vec<Entry<V>>) {
        let mut used_bytes = 0u64;
        let within_budget = entries.iter().take_while(|entry| {
            used_bytes = used_bytes.saturating_add(entry.num_bytes);
            used_bytes <= self.budget_bytes
        });
        let num_kept = within_budget.count().max(1);
        entries.truncate(num_kept);
    }
}

// A value is there whole or not at all, so a panic elsewhere cannot leave it half-made.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Which of the keys in a row had to be made, each of 10 bytes.
    fn made(budget_bytes: u64, keys: &[usize]) -> Vec<usize> {
        let cache = Cache::new(budget_bytes);
        let mut made = Vec::new();
        for &key in keys {
            let make = || {
                made.push(key);
                Ok::<_, ()>((key * 100, 10))
            };
            assert_eq!(*cache.get(key, 10, make).unwrap(), key * 100);
        }
        made
    }

    #[test]
    fn the_lately_used_are_kept_up_to_the_budget() {
        assert_eq!(made(20, &[1, 2, 1, 2, 1]), [1, 2]);
        assert_eq!(made(20, &[1, 2, 1, 3, 1, 2]), [1, 2, 3, 2]);
        assert_eq!(made(0, &[1, 1, 2, 2, 1]), [1, 2, 1]);
    }

    #[test]
    fn what_turns_out_larger_displaces_others() {
        let cache = Cache::new(100);
        let mut num_made = 0;
        for (key, made_bytes) in [(1, 10), (2, 10), (3, 95), (2, 10), (3, 95)] {
            let make = || {
                num_made += 1;
                Ok::<_, ()>(((), made_bytes))
            };
            cache.get(key, 10, make).unwrap();
        }
        assert_eq!(num_made, 5, "3 leaves no room for 2, and 2 none for 3");
    }

    #[test]
    fn what_failed_is_tried_again() {
        let cache = Cache::new(100);
        assert_eq!(cache.get(1, 10, || Err::<((), u64), _>("no")).unwrap_err(), "no");
        cache.get(1, 10, || Ok::<_, &str>(((), 10))).unwrap();
    }

    #[test]
    fn threads_that_want_the_same_value_make_it_once() {
        let cache = Cache::new(100);
        let made = std::sync::atomic::AtomicUsize::new(0);
        let barrier = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    barrier.wait();
                    let make = || Ok::<_, ()>((made.fetch_add(1, std::sync::atomic::Ordering::Relaxed), 10));
                    assert_eq!(*cache.get(7, 10, make).unwrap(), 0);
                });
            }
        });
    }
}
