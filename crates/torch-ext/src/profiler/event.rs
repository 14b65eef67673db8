//! One entry of a recording.

/// Something that was recorded: an operator, a named range, a kernel, an allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// The operator's name (`aten::mm`), the range's, the kernel's, or `[memory]` for an allocation.
    pub name: String,
    /// Nanoseconds, of a clock whose zero does not matter.
    pub start_ns: u64,
    /// Nanoseconds of the same clock.
    pub end_ns: u64,
    /// Number of the CPU thread it ran on, or was launched from.
    pub thread: u64,
    /// It ran on a device, not on the CPU; of an allocation: the memory is a device's.
    pub is_on_device: bool,
    /// Index of the device, -1 for the CPU.
    pub device_index: i32,
    /// Identifies an operator for the kernels that it launched.
    pub correlation_id: u64,
    /// Of a kernel: the operator that launched it. 0 for none.
    pub linked_correlation_id: u64,
    /// Bytes that were allocated, or released when negative. 0 for anything but an allocation.
    pub num_bytes: i64,
    /// Estimated floating-point operations, where they were asked for and are known.
    pub flops: u64,
    /// Shapes of the inputs, where they were asked for; inputs that are no tensors have an empty one.
    pub input_shapes: Vec<Vec<i64>>,
    /// Where TorchScript source called it, innermost first, where it was asked for.
    pub stack: Vec<String>,
    /// Which TorchScript modules called it, where it was asked for.
    pub module_hierarchy: Vec<String>,
    /// It ended on another thread than it began.
    pub is_async: bool,
    /// libtorch's own bookkeeping.
    pub is_hidden: bool,
    /// A range that [`record_function`](super::record_function) named.
    pub is_user_annotation: bool,
}

impl Event {
    /// Time from start to end, in nanoseconds.
    ///
    /// ```
    /// use torch_ext::profiler::Event;
    /// let event = Event { start_ns: 100, end_ns: 350, ..Default::default() };
    /// assert_eq!(event.duration_ns(), 250);
    /// ```
    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    pub(super) fn is_memory(&self) -> bool {
        self.name == "[memory]"
    }
}

/// Mirrors `Event` in shim/profiler.cpp.
#[repr(C)]
pub(super) struct RawEvent {
    name: *const u8,
    name_length: usize,
    stack: *const u8,
    stack_length: usize,
    modules: *const u8,
    modules_length: usize,
    dims: *const i64,
    ranks: *const i64,
    num_inputs: usize,
    start_ns: u64,
    end_ns: u64,
    thread: u64,
    correlation_id: u64,
    linked_correlation_id: u64,
    flops: u64,
    num_bytes: i64,
    device_type: i32,
    device_index: i32,
    is_async: bool,
    is_hidden: bool,
    is_user_scope: bool,
}

impl RawEvent {
    /// Copies it.
    ///
    /// # Safety
    /// Its pointers must be those that the shim has just filled in.
    pub(super) unsafe fn read(&self) -> Event {
        // SAFETY: the caller upholds that each pointer has as many valid elements as the length beside it says, and
        // `dims` as many as the ranks add up to.
        unsafe {
            Event {
                name: text(self.name, self.name_length),
                start_ns: self.start_ns,
                end_ns: self.end_ns,
                thread: self.thread,
                is_on_device: self.device_type != 0,
                device_index: self.device_index,
                correlation_id: self.correlation_id,
                linked_correlation_id: self.linked_correlation_id,
                num_bytes: self.num_bytes,
                flops: self.flops,
                input_shapes: self.input_shapes(),
                stack: lines(&text(self.stack, self.stack_length)),
                module_hierarchy: lines(&text(self.modules, self.modules_length)),
                is_async: self.is_async,
                is_hidden: self.is_hidden,
                is_user_annotation: self.is_user_scope,
            }
        }
    }

    unsafe fn input_shapes(&self) -> Vec<Vec<i64>> {
        // SAFETY: as for `read`.
        let ranks = unsafe { elements(self.ranks, self.num_inputs) };
        let lengths: Vec<usize> = ranks.iter().map(|&rank| usize::try_from(rank).unwrap_or(0)).collect();
        // SAFETY: as for `read`.
        let mut dims = unsafe { elements(self.dims, lengths.iter().sum()) };
        let mut shapes = Vec::with_capacity(lengths.len());
        for length in lengths {
            let (shape, rest) = dims.split_at(length);
            shapes.push(shape.to_vec());
            dims = rest;
        }
        shapes
    }
}

/// An empty C++ vector may have a null pointer, which a slice may not.
unsafe fn elements<'a, T>(pointer: *const T, length: usize) -> &'a [T] {
    if pointer.is_null() || length == 0 {
        return &[];
    }
    // SAFETY: the caller upholds that `length` elements are there.
    unsafe { std::slice::from_raw_parts(pointer, length) }
}

unsafe fn text(pointer: *const u8, length: usize) -> String {
    // SAFETY: passed on to the caller.
    String::from_utf8_lossy(unsafe { elements(pointer, length) }).into_owned()
}

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}
