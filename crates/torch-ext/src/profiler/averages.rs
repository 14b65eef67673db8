//! Sums over the events of a recording: pure arithmetic on times and nesting.

use super::Event;
use std::collections::HashMap;
use std::fmt::{self, Write as _};

/// Sums over all events of one name (and, if asked for, of the same input shapes). Times in nanoseconds, memory in bytes,
/// released memory counts negative.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyAverage {
    /// The operator, range or kernel.
    pub name: String,
    /// The input shapes that these events share; empty unless grouped by them.
    pub input_shapes: Vec<Vec<i64>>,
    /// Is it what was seen on a device: a kernel, a copy, or how long the work of a range lasted there?
    pub is_on_device: bool,
    /// Number of events.
    pub count: usize,
    /// CPU time without that of events inside of these.
    pub self_cpu_ns: u64,
    /// CPU time from start to end.
    pub cpu_ns: u64,
    /// Time on devices of the kernels that these events launched themselves; of a kernel, its own.
    pub self_device_ns: u64,
    /// The same with the events inside of these.
    pub device_ns: u64,
    /// CPU memory that these events allocated themselves, less what they released.
    pub self_cpu_bytes: i64,
    /// The same with the events inside of these.
    pub cpu_bytes: i64,
    /// As `self_cpu_bytes`, of devices.
    pub self_device_bytes: i64,
    /// As `cpu_bytes`, of devices.
    pub device_bytes: i64,
    /// Estimated floating-point operations; 0 unless recorded.
    pub flops: u64,
}

/// By which sum a table is ordered, largest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SortBy {
    /// CPU time without events inside.
    #[default]
    SelfCpuTime,
    /// CPU time.
    CpuTime,
    /// Device time of kernels that the events launched themselves.
    SelfDeviceTime,
    /// Device time.
    DeviceTime,
    /// CPU memory without events inside.
    SelfCpuMemory,
    /// CPU memory.
    CpuMemory,
    /// Device memory without events inside.
    SelfDeviceMemory,
    /// Device memory.
    DeviceMemory,
    /// Number of events.
    Count,
    /// Floating-point operations.
    Flops,
}

/// The sums of a recording by name: `key_averages()` of `torch.profiler`. Displays as a table.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use torch_ext::profiler::{Profiler, ProfilerOptions, SortBy};
///
/// let x = Tensor::ones([8, 8], (Kind::Float, Device::Cpu));
/// let profiler = Profiler::start(&ProfilerOptions::default())?;
/// let _ = x.matmul(&x).relu();
/// let averages = profiler.stop()?.key_averages(Default::default())?;
/// let matmul = averages.get("aten::matmul").unwrap();
/// assert!(matmul.count == 1 && matmul.self_cpu_ns < matmul.cpu_ns); // aten::mm is inside
/// println!("{}", averages.table(SortBy::CpuTime, 10));
/// # Ok::<(), torch_ext::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyAverages {
    rows: Vec<KeyAverage>,
}

/// One event of the CPU with what is known of it after the sweep.
struct Node<'a> {
    event: &'a Event,
    parent: Option<usize>,
    sums: KeyAverage,
}

/// Over what [`KeyAverages`] are sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyAveragesOptions {
    /// Keep events of one name apart whose inputs have other shapes? `record_shapes` records them. Default false.
    pub group_by_input_shape: bool,
}

impl KeyAverages {
    /// Sums over `events`, by name, or by name and shapes of the inputs.
    ///
    /// An event is inside of another one of the same thread that began before and ended after it; an allocation
    /// belongs to the innermost event around it, or stands as `[memory]` where there is none.
    ///
    /// ```
    /// use torch_ext::profiler::{Event, KeyAverages};
    /// let event = |name: &str, start_ns, end_ns| Event { name: name.into(), start_ns, end_ns, ..Default::default() };
    /// let averages = KeyAverages::of(&[event("outer", 0, 100), event("inner", 20, 50)], Default::default());
    /// assert_eq!(averages.get("outer").map(|row| (row.self_cpu_ns, row.cpu_ns)), Some((70, 100)));
    /// ```
    pub fn of(events: &[Event], options: KeyAveragesOptions) -> Self {
        let KeyAveragesOptions { group_by_input_shape } = options;
        let mut nodes: Vec<Node<'_>> = Vec::new();
        let mut rows = Rows { group_by_input_shape, ..Rows::default() };
        let mut threads: HashMap<u64, Vec<&Event>> = HashMap::new();
        for event in events.iter().filter(|event| !event.is_hidden) {
            match event {
                event if event.is_memory() || !(event.is_on_device || event.is_async) => {
                    threads.entry(event.thread).or_default().push(event);
                }
                event => rows.add(event, &alone(event)),
            }
        }
        for thread in threads.into_values() {
            sweep(thread, &mut nodes, &mut rows);
        }
        add_kernels(events, &mut nodes);
        // In the order of the recording, so that equal rows of a table come in the same order every time.
        nodes.sort_by_key(|node| (node.event.start_ns, node.event.thread));
        for node in &nodes {
            rows.add(node.event, &node.sums);
        }
        Self { rows: rows.rows }
    }

    /// All sums, in the order in which their names first occurred.
    pub fn rows(&self) -> &[KeyAverage] {
        &self.rows
    }

    /// The sums of one name: those of the CPU, if a range of that name is on a device as well; the first ones if they are grouped by shapes.
    pub fn get(&self, name: &str) -> Option<&KeyAverage> {
        let mut rows = self.rows.iter().filter(|row| row.name == name);
        rows.clone().find(|row| !row.is_on_device).or_else(|| rows.next())
    }

    /// A table for people: the `row_limit` largest rows by `sort_by`. Percentages are of the whole table's self CPU time.
    pub fn table(&self, sort_by: SortBy, row_limit: usize) -> String {
        let mut rows: Vec<&KeyAverage> = self.rows.iter().collect();
        rows.sort_by_key(|row| std::cmp::Reverse(sort_by.of(row)));
        rows.truncate(row_limit);
        let total: u64 = self.rows.iter().map(|row| row.self_cpu_ns).sum();
        let columns = self.columns();
        let mut lines = vec![columns.iter().map(|column| column.head().to_owned()).collect::<Vec<_>>()];
        lines.extend(rows.iter().map(|row| columns.iter().map(|column| column.cell(row, total)).collect()));
        let mut table = aligned(&lines);
        // Writing to a string cannot fail.
        let _ = writeln!(table, "Self CPU time total: {}", duration(total));
        table
    }

    /// The columns in which anything stands.
    fn columns(&self) -> Vec<Column> {
        let any = |has: fn(&KeyAverage) -> bool| self.rows.iter().any(has);
        let mut columns = vec![Column::Name, Column::SelfCpuShare, Column::SelfCpu, Column::Cpu, Column::CpuAverage];
        if any(|row| row.device_ns != 0) {
            columns.extend([Column::SelfDevice, Column::Device]);
        }
        if any(|row| row.cpu_bytes != 0) {
            columns.extend([Column::SelfCpuMemory, Column::CpuMemory]);
        }
        if any(|row| row.device_bytes != 0) {
            columns.extend([Column::SelfDeviceMemory, Column::DeviceMemory]);
        }
        columns.push(Column::Count);
        if any(|row| row.flops != 0) {
            columns.push(Column::Flops);
        }
        if any(|row| !row.input_shapes.is_empty()) {
            columns.push(Column::InputShapes);
        }
        columns
    }
}

impl fmt::Display for KeyAverages {
    /// The hundred largest by self CPU time.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.table(SortBy::SelfCpuTime, 100))
    }
}

impl SortBy {
    fn of(self, row: &KeyAverage) -> i128 {
        match self {
            Self::SelfCpuTime => row.self_cpu_ns.into(),
            Self::CpuTime => row.cpu_ns.into(),
            Self::SelfDeviceTime => row.self_device_ns.into(),
            Self::DeviceTime => row.device_ns.into(),
            Self::SelfCpuMemory => row.self_cpu_bytes.into(),
            Self::CpuMemory => row.cpu_bytes.into(),
            Self::SelfDeviceMemory => row.self_device_bytes.into(),
            Self::DeviceMemory => row.device_bytes.into(),
            Self::Count => row.count as i128,
            Self::Flops => row.flops.into(),
        }
    }
}

/// What an event is worth that nothing nests in.
fn alone(event: &Event) -> KeyAverage {
    let time = if event.is_async { 0 } else { event.duration_ns() };
    KeyAverage { self_device_ns: time, device_ns: time, ..KeyAverage::default() }
}

/// Finds what is inside of what on one thread, and whose the memory is.
fn sweep<'a>(mut events: Vec<&'a Event>, nodes: &mut Vec<Node<'a>>, rows: &mut Rows) {
    // Of two that begin together the longer is around the other; an allocation is inside of both.
    events.sort_by_key(|event| (event.start_ns, event.is_memory(), std::cmp::Reverse(event.end_ns)));
    let mut open: Vec<usize> = Vec::new();
    for event in events {
        while open.last().is_some_and(|&top| !is_inside(event, nodes[top].event)) {
            open.pop();
        }
        let parent = open.last().copied();
        if event.is_memory() {
            match parent {
                Some(parent) => add_memory(event, parent, nodes),
                None => rows.add(event, &memory_of(event)),
            }
            continue;
        }
        let time = event.duration_ns();
        if let Some(parent) = parent {
            let own = &mut nodes[parent].sums.self_cpu_ns;
            *own = own.saturating_sub(time);
        }
        open.push(nodes.len());
        let sums = KeyAverage { self_cpu_ns: time, cpu_ns: time, flops: event.flops, ..KeyAverage::default() };
        nodes.push(Node { event, parent, sums });
    }
}

fn is_inside(event: &Event, outer: &Event) -> bool {
    event.start_ns < outer.end_ns && event.end_ns.max(event.start_ns) <= outer.end_ns
}

fn memory_of(event: &Event) -> KeyAverage {
    let bytes = event.num_bytes;
    let (cpu, device) = if event.is_on_device { (0, bytes) } else { (bytes, 0) };
    KeyAverage {
        self_cpu_bytes: cpu,
        cpu_bytes: cpu,
        self_device_bytes: device,
        device_bytes: device,
        ..KeyAverage::default()
    }
}

fn add_memory(event: &Event, owner: usize, nodes: &mut [Node<'_>]) {
    let memory = memory_of(event);
    nodes[owner].sums.self_cpu_bytes += memory.cpu_bytes;
    nodes[owner].sums.self_device_bytes += memory.device_bytes;
    each_around(owner, nodes, |sums| {
        sums.cpu_bytes += memory.cpu_bytes;
        sums.device_bytes += memory.device_bytes;
    });
}

/// Gives the time of kernels to the operators that launched them.
fn add_kernels(events: &[Event], nodes: &mut [Node<'_>]) {
    let launchers: HashMap<u64, usize> =
        nodes.iter().enumerate().map(|(index, node)| (node.event.correlation_id, index)).collect();
    for kernel in events.iter().filter(|event| event.is_on_device && !event.is_memory() && !event.is_hidden) {
        let launcher = launchers.get(&kernel.linked_correlation_id).filter(|_| kernel.linked_correlation_id != 0);
        let Some(&launcher) = launcher else { continue };
        let time = kernel.duration_ns();
        nodes[launcher].sums.self_device_ns += time;
        each_around(launcher, nodes, |sums| sums.device_ns += time);
    }
}

fn each_around(innermost: usize, nodes: &mut [Node<'_>], mut change: impl FnMut(&mut KeyAverage)) {
    let mut next = Some(innermost);
    while let Some(index) = next {
        change(&mut nodes[index].sums);
        next = nodes[index].parent;
    }
}

#[derive(Default)]
struct Rows {
    rows: Vec<KeyAverage>,
    positions: HashMap<(String, Vec<Vec<i64>>, bool), usize>,
    group_by_input_shape: bool,
}

impl Rows {
    fn add(&mut self, event: &Event, sums: &KeyAverage) {
        let shapes = if self.group_by_input_shape { event.input_shapes.clone() } else { Vec::new() };
        let key = (event.name.clone(), shapes, event.is_on_device);
        let position = *self.positions.entry(key).or_insert_with_key(|(name, shapes, is_on_device)| {
            let (name, input_shapes, is_on_device) = (name.clone(), shapes.clone(), *is_on_device);
            self.rows.push(KeyAverage { name, input_shapes, is_on_device, ..KeyAverage::default() });
            self.rows.len() - 1
        });
        let row = &mut self.rows[position];
        row.count += 1;
        row.self_cpu_ns += sums.self_cpu_ns;
        row.cpu_ns += sums.cpu_ns;
        row.self_device_ns += sums.self_device_ns;
        row.device_ns += sums.device_ns;
        row.self_cpu_bytes += sums.self_cpu_bytes;
        row.cpu_bytes += sums.cpu_bytes;
        row.self_device_bytes += sums.self_device_bytes;
        row.device_bytes += sums.device_bytes;
        row.flops += sums.flops;
    }
}

#[derive(Clone, Copy)]
enum Column {
    Name,
    SelfCpuShare,
    SelfCpu,
    Cpu,
    CpuAverage,
    SelfDevice,
    Device,
    SelfCpuMemory,
    CpuMemory,
    SelfDeviceMemory,
    DeviceMemory,
    Count,
    Flops,
    InputShapes,
}

impl Column {
    fn head(self) -> &'static str {
        match self {
            Self::Name => "Name",
            Self::SelfCpuShare => "Self CPU %",
            Self::SelfCpu => "Self CPU",
            Self::Cpu => "CPU total",
            Self::CpuAverage => "CPU time avg",
            Self::SelfDevice => "Self CUDA",
            Self::Device => "CUDA total",
            Self::SelfCpuMemory => "Self CPU Mem",
            Self::CpuMemory => "CPU Mem",
            Self::SelfDeviceMemory => "Self CUDA Mem",
            Self::DeviceMemory => "CUDA Mem",
            Self::Count => "# of Calls",
            Self::Flops => "MFLOPs",
            Self::InputShapes => "Input Shapes",
        }
    }

    fn cell(self, row: &KeyAverage, total: u64) -> String {
        match self {
            Self::Name => row.name.clone(),
            Self::SelfCpuShare => format!("{:.2}%", 100.0 * row.self_cpu_ns as f64 / total.max(1) as f64),
            Self::SelfCpu => duration(row.self_cpu_ns),
            Self::Cpu => duration(row.cpu_ns),
            Self::CpuAverage => duration(row.cpu_ns / row.count.max(1) as u64),
            Self::SelfDevice => duration(row.self_device_ns),
            Self::Device => duration(row.device_ns),
            Self::SelfCpuMemory => bytes(row.self_cpu_bytes),
            Self::CpuMemory => bytes(row.cpu_bytes),
            Self::SelfDeviceMemory => bytes(row.self_device_bytes),
            Self::DeviceMemory => bytes(row.device_bytes),
            Self::Count => row.count.to_string(),
            Self::Flops => format!("{:.3}", row.flops as f64 / 1e6),
            Self::InputShapes => format!("{:?}", row.input_shapes),
        }
    }
}

/// The first column to the left, the others to the right, two spaces between.
fn aligned(lines: &[Vec<String>]) -> String {
    let num_columns = lines.first().map_or(0, Vec::len);
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..num_columns).map(width).collect();
    let rule = "-".repeat(widths.iter().sum::<usize>() + 2 * num_columns.saturating_sub(1));
    let mut text = String::new();
    for (number, line) in lines.iter().enumerate() {
        for (column, (cell, &width)) in line.iter().zip(&widths).enumerate() {
            // Writing to a string cannot fail.
            let _ = if column == 0 { write!(text, "{cell:<width$}") } else { write!(text, "  {cell:>width$}") };
        }
        text.push('\n');
        if number == 0 || number + 1 == lines.len() {
            text.push_str(&rule);
            text.push('\n');
        }
    }
    text
}

fn duration(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{:.3}us", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.3}ms", ns as f64 / 1e6),
        _ => format!("{:.3}s", ns as f64 / 1e9),
    }
}

fn bytes(count: i64) -> String {
    const KIB: f64 = 1024.0;
    let magnitude = count.unsigned_abs() as f64;
    match magnitude {
        m if m < KIB => format!("{count} B"),
        m if m < KIB * KIB => format!("{:.2} KiB", count as f64 / KIB),
        m if m < KIB * KIB * KIB => format!("{:.2} MiB", count as f64 / KIB / KIB),
        _ => format!("{:.2} GiB", count as f64 / KIB / KIB / KIB),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn op(name: &str, thread: u64, start_ns: u64, end_ns: u64) -> Event {
        Event { name: name.to_owned(), thread, start_ns, end_ns, device_index: -1, ..Event::default() }
    }

    fn memory(start_ns: u64, num_bytes: i64) -> Event {
        Event { num_bytes, ..op("[memory]", 1, start_ns, start_ns) }
    }

    /// (name, count, self time, time, self memory, memory)
    fn check(events: &[Event], rows: &[(&str, usize, u64, u64, i64, i64)]) {
        let averages = KeyAverages::of(events, Default::default());
        let found: Vec<_> = averages
            .rows()
            .iter()
            .map(|row| (&*row.name, row.count, row.self_cpu_ns, row.cpu_ns, row.self_cpu_bytes, row.cpu_bytes))
            .collect();
        assert_eq!(found, rows);
    }

    #[test]
    fn time_inside_of_another_event_is_not_its_own() {
        check(
            &[op("a", 1, 0, 100), op("b", 1, 10, 40), op("c", 1, 20, 30), op("b", 1, 50, 60)],
            &[("a", 1, 60, 100, 0, 0), ("b", 2, 30, 40, 0, 0), ("c", 1, 10, 10, 0, 0)],
        );
        // Neither another thread's, nor one after the other, nor one that ends later.
        check(&[op("a", 1, 0, 100), op("b", 2, 10, 40)], &[("a", 1, 100, 100, 0, 0), ("b", 1, 30, 30, 0, 0)]);
        check(&[op("a", 1, 0, 100), op("b", 1, 100, 140)], &[("a", 1, 100, 100, 0, 0), ("b", 1, 40, 40, 0, 0)]);
        check(&[op("a", 1, 0, 100), op("b", 1, 90, 140)], &[("a", 1, 100, 100, 0, 0), ("b", 1, 50, 50, 0, 0)]);
        // The longer of two that begin together is around the other.
        check(&[op("b", 1, 0, 50), op("a", 1, 0, 100)], &[("a", 1, 50, 100, 0, 0), ("b", 1, 50, 50, 0, 0)]);
    }

    /// A GPU's recording has a named range twice: as the CPU ran it, and as long as its kernels ran.
    #[test]
    fn a_range_on_the_device_is_a_row_of_its_own() {
        let on_device = Event { is_on_device: true, device_index: 0, ..op("forward", 7, 40, 90) };
        let averages =
            KeyAverages::of(&[on_device, op("forward", 1, 0, 10), op("forward", 1, 20, 30)], Default::default());
        let counts: Vec<_> = averages.rows().iter().map(|row| (row.is_on_device, row.count, row.cpu_ns)).collect();
        assert_eq!(counts, [(true, 1, 0), (false, 2, 20)]);
        assert_eq!(averages.get("forward").map(|row| row.count), Some(2));
    }

    #[test]
    fn memory_belongs_to_the_innermost_event() {
        let events = [op("a", 1, 0, 100), op("b", 1, 10, 40), memory(20, 64), memory(50, 16), memory(60, -64)];
        check(&events, &[("a", 1, 70, 100, -48, 16), ("b", 1, 30, 30, 64, 64)]);
        check(&[memory(5, 8), op("a", 1, 10, 20)], &[("[memory]", 1, 0, 0, 8, 8), ("a", 1, 10, 10, 0, 0)]);
        let elsewhere = Event { thread: 2, ..memory(15, 8) };
        check(&[op("a", 1, 10, 20), elsewhere], &[("[memory]", 1, 0, 0, 8, 8), ("a", 1, 10, 10, 0, 0)]);
    }

    #[test]
    fn kernels_count_for_the_operator_that_launched_them() {
        let outer = Event { correlation_id: 1, ..op("aten::linear", 1, 0, 100) };
        let inner = Event { correlation_id: 2, ..op("aten::addmm", 1, 10, 90) };
        let kernel = Event { is_on_device: true, linked_correlation_id: 2, ..op("gemm", 7, 200, 260) };
        let averages = KeyAverages::of(&[outer, inner, kernel], Default::default());
        let device = |name: &str| averages.get(name).map(|row| (row.self_device_ns, row.device_ns, row.cpu_ns));
        assert_eq!(device("aten::linear"), Some((0, 60, 100)));
        assert_eq!(device("aten::addmm"), Some((60, 60, 80)));
        assert_eq!(device("gemm"), Some((60, 60, 0)));
        assert!(averages.to_string().contains("CUDA total"));
    }

    #[test]
    fn shapes_divide_a_name_only_when_asked() {
        let with_shape =
            |size| Event { input_shapes: vec![vec![size]], ..op("a", 1, 10 * size as u64, 11 * size as u64) };
        let events = [with_shape(1), with_shape(2), with_shape(1)];
        assert_eq!(KeyAverages::of(&events, Default::default()).rows().len(), 1);
        let grouped = KeyAverages::of(&events, KeyAveragesOptions { group_by_input_shape: true });
        assert_eq!(grouped.rows().iter().map(|row| row.count).collect::<Vec<_>>(), [2, 1]);
        assert!(grouped.to_string().contains("[[2]]"));
    }

    #[test]
    fn a_table_is_sorted_and_cut() {
        let events = [op("short", 1, 0, 1_500), op("long", 1, 2_000, 2_003_000), op("short", 1, 3_000_000, 3_000_100)];
        let table = KeyAverages::of(&events, Default::default()).table(SortBy::SelfCpuTime, 1);
        assert!(table.contains("long") && !table.contains("short"), "{table}");
        assert!(table.contains("2.001ms") && table.contains("Self CPU time total: 2.003ms"), "{table}");
        let by_count = KeyAverages::of(&events, Default::default()).table(SortBy::Count, 2);
        assert!(by_count.find("short") < by_count.find("long"), "{by_count}");
        assert!(!table.contains("Mem") && !table.contains("CUDA") && !table.contains("FLOPs"), "{table}");
    }
}
