//! libtorch's profiler: what ran, when, on what, and how much memory it took.

mod averages;
mod event;

pub use averages::{KeyAverage, KeyAverages, KeyAveragesOptions, SortBy};
pub use event::Event;

use crate::border::{Handle, check};
use crate::error::{Error, ErrorKind, Result};
use event::RawEvent;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

unsafe extern "C" {
    fn te_profiler_prepare(options: *const RawOptions) -> i32;
    fn te_profiler_start(options: *const RawOptions) -> i32;
    fn te_profiler_stop(trace: *mut Handle) -> i32;
    fn te_profiler_add_metadata(key: *const u8, key_length: usize, value: *const u8, value_length: usize) -> i32;
    fn te_trace_free(trace: Handle);
    fn te_trace_num_events(trace: Handle) -> usize;
    fn te_trace_event(trace: Handle, index: usize, event: *mut RawEvent) -> i32;
    fn te_trace_save(trace: Handle, path: *const u8, length: usize) -> i32;
    fn te_record_function_enter(name: *const u8, length: usize, record: *mut Handle) -> i32;
    fn te_record_function_exit(record: Handle);
}

/// libtorch has one trace for the whole process.
static IS_IN_USE: AtomicBool = AtomicBool::new(false);

/// What the profiler records: the arguments of `torch.profiler.profile`.
///
/// ```
/// use torch_ext::profiler::ProfilerOptions;
/// let options = ProfilerOptions { record_shapes: true, ..Default::default() };
/// assert!(options.cpu && !options.cuda && !options.profile_memory);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProfilerOptions {
    /// Operators and named ranges on the CPU, and calls of the CUDA runtime. Default true.
    pub cpu: bool,
    /// Kernels and copies on CUDA devices. Default false.
    pub cuda: bool,
    /// The shapes of the operators' inputs. Default false.
    pub record_shapes: bool,
    /// Every allocation and release of tensor memory. Default false.
    pub profile_memory: bool,
    /// Where in the source of a TorchScript module an operator was called. Rust's own stack is not recorded. Default
    /// false.
    pub with_stack: bool,
    /// Floating-point operations of matrix products, convolutions, sums and products, by formula. Default false.
    pub with_flops: bool,
    /// Which submodules of a TorchScript module called an operator. Default false.
    pub with_modules: bool,
}

impl Default for ProfilerOptions {
    fn default() -> Self {
        Self {
            cpu: true,
            cuda: false,
            record_shapes: false,
            profile_memory: false,
            with_stack: false,
            with_flops: false,
            with_modules: false,
        }
    }
}

/// Mirrors `ProfilerOptions` in shim/profiler.cpp.
#[repr(C)]
struct RawOptions {
    cpu: bool,
    cuda: bool,
    record_shapes: bool,
    profile_memory: bool,
    with_stack: bool,
    with_flops: bool,
    with_modules: bool,
}

impl From<&ProfilerOptions> for RawOptions {
    fn from(options: &ProfilerOptions) -> Self {
        let ProfilerOptions { cpu, cuda, record_shapes, profile_memory, with_stack, with_flops, with_modules } =
            *options;
        Self { cpu, cuda, record_shapes, profile_memory, with_stack, with_flops, with_modules }
    }
}

/// A running profiler: the counterpart of `torch.profiler.profile` without its schedule.
///
/// It records what this thread does, and what libtorch does for it on threads of its own during backward passes. There is
/// at most one in a process. Dropping it throws the recording away.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use torch_ext::profiler::{Profiler, ProfilerOptions};
///
/// let x = Tensor::ones([8, 8], (Kind::Float, Device::Cpu));
/// let profiler = Profiler::start(&ProfilerOptions::default())?;
/// let _ = x.matmul(&x);
/// let trace = profiler.stop()?;
/// assert!(trace.events()?.iter().any(|event| event.name == "aten::matmul"));
/// # Ok::<(), torch_ext::Error>(())
/// ```
#[must_use = "dropping the profiler throws its recording away"]
pub struct Profiler {
    options: ProfilerOptions,
    state: State,
    /// The recording belongs to the thread that began it.
    this_thread: PhantomData<*const ()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Prepared,
    Recording,
    Stopped,
}

impl Profiler {
    /// Sets everything up without recording: devices that are traced need a while to become steady. Then
    /// [`Profiler::record`].
    ///
    /// # Errors
    /// Nothing to record (`is_invalid_argument`); CUDA without a CUDA device (`is_invalid_argument`); another profiler
    /// in this process (`is_busy`).
    pub fn prepare(options: &ProfilerOptions) -> Result<Self> {
        let operation = "Profiler::prepare";
        if !options.cpu && !options.cuda {
            return Err(Error::invalid(operation, "neither cpu nor cuda is to be recorded; turn one of them on"));
        }
        if options.cuda && !tch::Cuda::is_available() {
            return Err(Error::invalid(operation, "cuda is to be recorded, but this process has no CUDA device"));
        }
        if IS_IN_USE.swap(true, Ordering::Acquire) {
            let message = "another profiler is running in this process, and libtorch has one trace for all threads; \
                           stop that one first";
            return Err(Error::new(ErrorKind::Busy, operation, message));
        }
        // SAFETY: the options are read during the call.
        let prepared = check(operation, unsafe { te_profiler_prepare(&RawOptions::from(options)) });
        if let Err(error) = prepared {
            IS_IN_USE.store(false, Ordering::Release);
            return Err(error);
        }
        Ok(Self { options: *options, state: State::Prepared, this_thread: PhantomData })
    }

    /// Begins to record.
    ///
    /// # Errors
    /// As [`Profiler::prepare`].
    pub fn start(options: &ProfilerOptions) -> Result<Self> {
        let mut profiler = Self::prepare(options)?;
        profiler.record()?;
        Ok(profiler)
    }

    /// Begins to record after [`Profiler::prepare`]; does nothing while it records already.
    ///
    /// # Errors
    /// libtorch's.
    pub fn record(&mut self) -> Result<()> {
        if self.state == State::Prepared {
            // SAFETY: the options are read during the call.
            check("Profiler::record", unsafe { te_profiler_start(&RawOptions::from(&self.options)) })?;
            self.state = State::Recording;
        }
        Ok(())
    }

    /// Writes `"key": json` into the head of the trace file that this recording will make.
    ///
    /// # Errors
    /// libtorch's. It does not check `json`: something else makes a file that is no JSON.
    pub fn add_metadata_json(&self, key: &str, json: &str) -> Result<()> {
        // SAFETY: both texts are copied during the call.
        check("Profiler::add_metadata_json", unsafe {
            te_profiler_add_metadata(key.as_ptr(), key.len(), json.as_ptr(), json.len())
        })
    }

    /// Ends the recording and hands it over.
    ///
    /// # Errors
    /// libtorch's; the recording was never begun (`is_invalid_argument`).
    pub fn stop(mut self) -> Result<Trace> {
        if self.state != State::Recording {
            return Err(Error::invalid("Profiler::stop", "nothing was recorded; call `record` first"));
        }
        self.state = State::Stopped;
        let mut raw = std::ptr::null_mut();
        // SAFETY: this thread's recording is on, and `raw` receives a trace that is owned from here on.
        check("Profiler::stop", unsafe { te_profiler_stop(&mut raw) })?;
        Ok(Trace { raw })
    }
}

impl Drop for Profiler {
    fn drop(&mut self) {
        if self.state != State::Stopped {
            // What was prepared can only be undone by starting and stopping it. Nobody could hear of a failure here.
            let _ = self.record();
            if self.state == State::Recording {
                // SAFETY: this thread's recording is on; null asks for no result.
                let _ = unsafe { te_profiler_stop(std::ptr::null_mut()) };
            }
        }
        IS_IN_USE.store(false, Ordering::Release);
    }
}

impl fmt::Debug for Profiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Profiler").field("options", &self.options).field("state", &self.state).finish()
    }
}

/// A finished recording.
pub struct Trace {
    raw: Handle,
}

// SAFETY: a trace is a plain heap object without ties to a thread, and it is used through one handle.
unsafe impl Send for Trace {}

impl Trace {
    /// Everything that was recorded, in the order in which it began on each thread.
    ///
    /// # Errors
    /// libtorch's.
    pub fn events(&self) -> Result<Vec<Event>> {
        // SAFETY: the trace is alive.
        let count = unsafe { te_trace_num_events(self.raw) };
        let mut events = Vec::with_capacity(count);
        for index in 0..count {
            let mut raw = std::mem::MaybeUninit::uninit();
            // SAFETY: the trace is alive and `raw` is written in full when the call succeeds; its pointers hold until the
            // next call, and `RawEvent::read` copies what they point to before that.
            unsafe {
                check("Trace::events", te_trace_event(self.raw, index, raw.as_mut_ptr()))?;
                events.push(raw.assume_init().read());
            }
        }
        Ok(events)
    }

    /// Sums over events of the same name: counts, times, memory.
    ///
    /// # Errors
    /// libtorch's.
    pub fn key_averages(&self, options: KeyAveragesOptions) -> Result<KeyAverages> {
        Ok(KeyAverages::of(&self.events()?, options))
    }

    /// Writes the recording in Chrome's trace format, as JSON, for `chrome://tracing` or Perfetto. Only once: libtorch
    /// takes the recording apart for it. [`Trace::events`] remains usable.
    ///
    /// # Errors
    /// The second call; a file that cannot be written, which libtorch itself only prints.
    ///
    /// ```
    /// use torch_ext::profiler::{Profiler, ProfilerOptions};
    /// let profiler = Profiler::start(&ProfilerOptions::default())?;
    /// let _ = tch::Tensor::from_slice(&[1f32]).relu();
    /// let path = std::env::temp_dir().join(format!("torch-ext-trace-{}.json", std::process::id()));
    /// profiler.stop()?.save(&path)?;
    /// assert!(std::fs::read_to_string(&path).unwrap().contains("aten::relu"));
    /// # std::fs::remove_file(&path).unwrap();
    /// # Ok::<(), torch_ext::Error>(())
    /// ```
    pub fn save(&mut self, path: &Path) -> Result<()> {
        let operation = "Trace::save";
        let failed = |error: std::io::Error| Error::invalid(operation, format!("{}: {error}", path.display()));
        let text =
            path.to_str().ok_or_else(|| Error::invalid(operation, format!("{} is not valid UTF-8", path.display())))?;
        // Where libtorch cannot write it says nothing, so the file is made here and must have grown afterwards.
        std::fs::File::create(path).map_err(failed)?;
        // SAFETY: the trace is alive; the path is copied during the call.
        check(operation, unsafe { te_trace_save(self.raw, text.as_ptr(), text.len()) })?;
        match std::fs::metadata(path).map_err(failed)?.len() {
            0 => Err(Error::invalid(operation, format!("libtorch could not write {}", path.display()))),
            _ => Ok(()),
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // SAFETY: the handle is owned and dropped once.
        unsafe { te_trace_free(self.raw) }
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: the trace is alive.
        f.debug_struct("Trace").field("num_events", &unsafe { te_trace_num_events(self.raw) }).finish()
    }
}

/// Gives what happens until the guard is dropped a name in the recording: `torch.profiler.record_function`. Without a
/// profiler it does nothing.
///
/// ```
/// use torch_ext::profiler::{Profiler, ProfilerOptions, record_function};
/// let profiler = Profiler::start(&ProfilerOptions::default())?;
/// {
///     let _range = record_function("load batch")?;
///     let _ = tch::Tensor::from_slice(&[1f32]).relu();
/// }
/// assert!(profiler.stop()?.events()?.iter().any(|event| event.name == "load batch"));
/// # Ok::<(), torch_ext::Error>(())
/// ```
///
/// # Errors
/// libtorch's.
pub fn record_function(name: &str) -> Result<RecordFunction> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: the name is copied during the call; `raw` receives an owned range.
    check("record_function", unsafe { te_record_function_enter(name.as_ptr(), name.len(), &mut raw) })?;
    Ok(RecordFunction { raw, this_thread: PhantomData })
}

/// A named range of a recording; see [`record_function`].
#[derive(Debug)]
#[must_use = "the range ends when the guard is dropped"]
pub struct RecordFunction {
    raw: Handle,
    /// libtorch ends a range on the thread that began it.
    this_thread: PhantomData<*const ()>,
}

impl Drop for RecordFunction {
    fn drop(&mut self) {
        // SAFETY: the handle is owned and dropped once, on its own thread.
        unsafe { te_record_function_exit(self.raw) }
    }
}
