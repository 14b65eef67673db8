//! Times a step of AdamW whose state is on a disk, beside what the disk takes to read and write as many bytes: both
//! halves of the race of `cargo xtask bench offload`.
//!
//! Prints one line of JSON: the times of all rounds, and the number of bytes. Ends with an error if any parameter
//! differs from that of an AdamW with its state in memory, to the bit.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use accelerate::OffloadTarget;
use accelerate::nn::{Init, ParamStore};
use accelerate::optim::{AdamW, Optimizer};
use accelerate::tch::{Device, Kind, Tensor};
use anyhow::{Context, Result, anyhow, ensure};
use bench::formula;
use clap::Parser;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use serde_json::json;

/// Time a step of an optimizer whose state is on a disk.
#[derive(Debug, Parser)]
struct Arguments {
    /// Folder on the disk
    #[arg(long)]
    folder: PathBuf,
    /// Steps that are timed
    #[arg(long)]
    steps: usize,
}

/// Threads that read, threads that write, and bytes of a block: as fast as the disk can is among them. Without threads
/// that write, those that read write each block behind it.
const TRIED: [(usize, usize, usize); 6] =
    [(4, 0, 1 << 20), (4, 0, 4 << 20), (4, 0, 16 << 20), (2, 2, 1 << 20), (2, 2, 8 << 20), (4, 4, 4 << 20)];

const ALIGNMENT: usize = 4096;

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let (store, mut optimizer) = training()?;
    let (same_store, mut same) = training()?;
    optimizer.offload_state(&OffloadTarget::Nvme(arguments.folder.clone()))?;
    let num_parameters: usize = store.parameters().iter().map(|param| param.numel()).sum();
    let num_bytes = (8 * num_parameters).next_multiple_of(TRIED.iter().map(|tried| tried.2).max().unwrap_or(1));
    let disk = Disk::new(&arguments.folder, num_bytes as u64)?;
    set_gradients(&store)?;
    set_gradients(&same_store)?;
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    // The first step and the first pass over the file make their rooms.
    for round in 0..=arguments.steps {
        let start = Instant::now();
        optimizer.step()?;
        let step = start.elapsed().as_secs_f64();
        let mut best = f64::INFINITY;
        for (num_readers, num_writers, block) in TRIED {
            best = best.min(disk.read_and_write(num_readers, num_writers, block)?);
        }
        if round > 0 {
            ours.push(step * 1e3);
            floor.push(best * 1e3);
        }
        same.step()?;
    }
    for (found, wanted) in store.parameters().iter().zip(same_store.parameters()) {
        ensure!(found.get().f_equal(&wanted.get())?, "{} differs from what it is with state in memory", found.name());
    }
    println!("report={}", json!({"ours": ours, "floor": floor, "num_parameters": num_parameters}));
    Ok(())
}

/// The parameters of the smallest GPT-2.
fn training() -> Result<(ParamStore, AdamW)> {
    let store = ParamStore::new(Device::Cpu);
    let mut shapes: Vec<Vec<i64>> = vec![vec![50257, 768], vec![1024, 768], vec![768], vec![768]];
    for _ in 0..12 {
        for outputs_and_inputs in [[2304, 768], [768, 768], [3072, 768], [768, 3072]] {
            shapes.push(outputs_and_inputs.to_vec());
            shapes.push(vec![outputs_and_inputs[0]]);
        }
        shapes.extend([vec![768], vec![768], vec![768], vec![768]]);
    }
    for (index, shape) in shapes.iter().enumerate() {
        let param = store.root().param(&format!("p{index}"), (shape.as_slice(), Init::Zeros))?;
        param.copy_(&formula(shape, index as f64)?)?;
    }
    let optimizer = AdamW::builder(&store).lr(1e-3).weight_decay(0.01).build()?;
    Ok((store, optimizer))
}

fn set_gradients(store: &ParamStore) -> Result<()> {
    for (index, param) in store.parameters().iter().enumerate() {
        let gradient: Tensor = formula(&param.shape(), index as f64 + 0.5)? * 0.01;
        (param.get() * gradient).sum(Kind::Float).f_backward()?;
    }
    Ok(())
}

/// A file of its own on the same disk, read and written around the page cache.
struct Disk {
    file: File,
    num_bytes: u64,
}

impl Disk {
    fn new(folder: &Path, num_bytes: u64) -> Result<Self> {
        let file = tempfile::tempfile_in(folder).with_context(|| format!("no file in {}", folder.display()))?;
        file.set_len(num_bytes)?;
        fcntl_setfl(&file, fcntl_getfl(&file)? | OFlags::DIRECT)
            .with_context(|| format!("{} is not on a disk that can be measured", folder.display()))?;
        let disk = Self { file, num_bytes };
        disk.read_and_write(2, 0, 4 << 20)?;
        Ok(disk)
    }

    /// Seconds in which threads read and write everything once, block by block.
    fn read_and_write(&self, num_readers: usize, num_writers: usize, block: usize) -> Result<f64> {
        let (read, written) = (AtomicU64::new(0), AtomicU64::new(0));
        let (read, written) = (&read, &written);
        let start = Instant::now();
        thread::scope(|scope| {
            let readers = (0..num_readers).map(|_| scope.spawn(move || self.work(read, block, true, num_writers == 0)));
            let readers: Vec<_> = readers.collect();
            let writers = (0..num_writers).map(|_| scope.spawn(move || self.work(written, block, false, true)));
            let threads: Vec<_> = readers.into_iter().chain(writers).collect();
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread has panicked"))?)
        })?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn work(&self, next: &AtomicU64, block: usize, reads: bool, writes: bool) -> Result<()> {
        let mut memory = vec![0; block + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        let bytes = &mut memory[start..start + block];
        loop {
            let offset = next.fetch_add(block as u64, Ordering::Relaxed);
            if self.num_bytes <= offset {
                return Ok(());
            }
            if reads {
                self.file.read_exact_at(bytes, offset)?;
            }
            if writes {
                self.file.write_all_at(bytes, offset)?;
            }
        }
    }
}
