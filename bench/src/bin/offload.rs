//! Times a step of AdamW whose state is on a disk, beside what the disk takes to read and write as many bytes: both
//! halves of the race of `cargo xtask bench offload`.
//!
//! Prints one line of JSON: the times of all rounds, and the number of bytes. Ends with an error if any parameter
//! differs from that of an AdamW with its state in memory, to the bit.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use accelerate::OffloadTarget;
use accelerate::nn::{Init, ParamStore};
use accelerate::optim::{AdamW, Optimizer};
use accelerate::tch::{Device, Kind, Tensor};
use anyhow::{Context, Result, anyhow, bail, ensure};
use bench::formula;
use clap::Parser;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use serde_json::json;
use torch_ext::file::{aligned_bytes, read_at, write_at};
use torch_ext::storage::{LARGE_PAGE_BYTES, prefer_large_pages};

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

/// Threads that read a block and write it where it was, and bytes of a block: as fast as the disk can is among them.
const TRIED: [(usize, usize); 6] = [(2, 1 << 20), (4, 1 << 19), (4, 1 << 20), (4, 4 << 20), (8, 1 << 18), (8, 1 << 19)];

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let (store, mut optimizer) = training()?;
    let (same_store, mut same) = training()?;
    optimizer.offload_state(&OffloadTarget::Nvme(arguments.folder.clone()))?;
    let num_parameters: usize = store.parameters().iter().map(|param| param.numel()).sum();
    set_gradients(&store)?;
    set_gradients(&same_store)?;
    optimizer.step()?;
    same.step()?;
    let disk = Disk::of_state(&arguments.folder, 8 * num_parameters as u64)?;
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    for step in 0..arguments.steps {
        let mut best = f64::INFINITY;
        // What a disk writes behind takes turns of its own: nobody is always at the same place of them.
        for turn in 0..=TRIED.len() {
            match (step + turn) % (TRIED.len() + 1) {
                0 => {
                    let start = Instant::now();
                    optimizer.step()?;
                    ours.push(start.elapsed().as_secs_f64() * 1e3);
                    same.step()?;
                }
                way => {
                    let (num_threads, block) = TRIED[way - 1];
                    best = best.min(disk.read_and_write(num_threads, block)? * 1e3);
                }
            }
        }
        floor.push(best);
    }
    for (found, wanted) in store.parameters().iter().zip(same_store.parameters()) {
        ensure!(found.get()?.f_equal(&wanted.get()?)?, "{} differs from what it is with state in memory", found.name());
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
        (param.get()? * gradient).sum(Kind::Float).f_backward()?;
    }
    Ok(())
}

/// The file with the optimizer's state itself: how fast a disk is differs from place to place.
struct Disk {
    file: File,
    num_bytes: u64,
}

impl Disk {
    /// Opens it once more: it has no name, but this process has it open.
    fn of_state(folder: &Path, least_bytes: u64) -> Result<Self> {
        let folder = folder.canonicalize()?;
        for descriptor in fs::read_dir("/proc/self/fd")? {
            let descriptor = descriptor?.path();
            // One that was closed meanwhile.
            let Ok(path) = fs::read_link(&descriptor) else { continue };
            if !path.starts_with(&folder) || fs::metadata(&descriptor)?.len() < least_bytes {
                continue;
            }
            let file = File::options().read(true).write(true).open(&descriptor)?;
            fcntl_setfl(&file, fcntl_getfl(&file)? | OFlags::DIRECT)
                .with_context(|| format!("{} is not on a disk that can be measured", folder.display()))?;
            return Ok(Self { num_bytes: file.metadata()?.len(), file });
        }
        bail!("the state is in no file in {}", folder.display())
    }

    /// Seconds in which threads read everything once and write it back, block by block.
    fn read_and_write(&self, num_threads: usize, block: usize) -> Result<f64> {
        let next = &AtomicU64::new(0);
        let start = Instant::now();
        thread::scope(|scope| {
            let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(move || self.work(next, block))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread has panicked"))?)
        })?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn work(&self, next: &AtomicU64, block: usize) -> Result<()> {
        // Of large pages, as an optimizer's: a disk takes almost twice as long for small ones.
        let memory = aligned_bytes(block.max(LARGE_PAGE_BYTES), LARGE_PAGE_BYTES)?;
        prefer_large_pages(&memory);
        loop {
            let offset = next.fetch_add(block as u64, Ordering::Relaxed);
            if self.num_bytes <= offset {
                return Ok(());
            }
            let size = block.min((self.num_bytes - offset) as usize);
            let bytes = memory.f_narrow(0, 0, size as i64)?;
            read_at(&self.file, &bytes, offset)?;
            write_at(&self.file, &bytes, offset)?;
        }
    }
}
