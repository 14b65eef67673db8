//! What the profiler records, and that there is one of it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::{Mutex, MutexGuard, PoisonError};
use tch::{Device, Kind, Tensor};
use torch_ext::profiler::{Event, Profiler, ProfilerOptions, record_function};

/// There is one profiler in a process, and tests of a file may be threads.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn record(options: ProfilerOptions) -> Vec<Event> {
    let x = Tensor::ones([4, 6], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let w = Tensor::ones([6, 5], (Kind::Float, Device::Cpu));
    let profiler = Profiler::start(&options).unwrap();
    {
        let _range = record_function("forward").unwrap();
        let loss = x.matmul(&w).relu().sum(Kind::Float);
        torch_ext::autograd::backward(&[&loss], None, Default::default()).unwrap();
    }
    profiler.stop().unwrap().events().unwrap()
}

fn named<'a>(events: &'a [Event], name: &str) -> &'a Event {
    let found = events.iter().find(|event| event.name == name);
    found.unwrap_or_else(|| panic!("no {name} in {:?}", events.iter().map(|event| &event.name).collect::<Vec<_>>()))
}

#[test]
fn operators_of_both_passes_are_inside_of_the_named_range() {
    let _alone = alone();
    let events = record(ProfilerOptions::default());
    let range = named(&events, "forward");
    assert!(range.is_user_annotation && !range.is_on_device);
    for name in ["aten::matmul", "aten::mm", "aten::relu", "MmBackward0"] {
        let event = named(&events, name);
        assert!(range.start_ns <= event.start_ns && event.end_ns <= range.end_ns && event.duration_ns() > 0, "{name}");
        assert_eq!(event.thread, range.thread);
        assert!(event.input_shapes.is_empty() && event.flops == 0 && !event.is_user_annotation);
    }
    assert!(events.iter().all(|event| event.name != "[memory]"));
}

#[test]
fn what_is_asked_for_is_recorded() {
    let _alone = alone();
    let options = ProfilerOptions { record_shapes: true, profile_memory: true, with_flops: true, ..Default::default() };
    let events = record(options);
    let product = named(&events, "aten::mm");
    assert_eq!(product.input_shapes, [vec![4, 6], vec![6, 5]]);
    assert_eq!(product.flops, 2 * 4 * 6 * 5);
    let allocations: Vec<i64> = events.iter().filter(|event| event.name == "[memory]").map(|e| e.num_bytes).collect();
    assert!(allocations.contains(&(4 * 5 * 4)) && allocations.contains(&(-4 * 5 * 4)), "{allocations:?}");
}

#[test]
fn a_second_profiler_is_refused_and_the_first_goes_on() {
    let _alone = alone();
    let first = Profiler::start(&ProfilerOptions::default()).unwrap();
    let error = Profiler::start(&ProfilerOptions::default()).unwrap_err();
    assert!(error.is_busy() && error.to_string().contains("one trace for all threads"), "{error}");
    let elsewhere =
        std::thread::spawn(|| Profiler::start(&ProfilerOptions::default()).map(drop).unwrap_err().is_busy());
    assert!(elsewhere.join().unwrap());
    let _ = Tensor::from_slice(&[1f32]).relu();
    named(&first.stop().unwrap().events().unwrap(), "aten::relu");
    // Dropped ones and merely prepared ones make room.
    drop(Profiler::start(&ProfilerOptions::default()).unwrap());
    drop(Profiler::prepare(&ProfilerOptions::default()).unwrap());
    assert!(Profiler::prepare(&ProfilerOptions::default()).unwrap().stop().unwrap_err().is_invalid_argument());
    named(&record(ProfilerOptions::default()), "aten::mm");
}

#[test]
fn wishes_that_cannot_be_honoured_are_errors() {
    let _alone = alone();
    let nothing = ProfilerOptions { cpu: false, ..Default::default() };
    assert!(Profiler::start(&nothing).unwrap_err().to_string().contains("neither cpu nor cuda"));
    if !tch::Cuda::is_available() {
        let cuda = ProfilerOptions { cuda: true, ..Default::default() };
        assert!(Profiler::start(&cuda).unwrap_err().to_string().contains("no CUDA device"));
    }
}

#[test]
fn a_trace_is_saved_once_and_where_it_can_be() {
    let _alone = alone();
    let profiler = Profiler::start(&ProfilerOptions::default()).unwrap();
    profiler.add_metadata_json("answer", "[42]").unwrap();
    let _ = Tensor::from_slice(&[1f32]).relu();
    let mut trace = profiler.stop().unwrap();
    let folder = std::env::temp_dir().join(format!("torch-ext-profiler-{}", std::process::id()));
    let error = trace.save(&folder.join("missing").join("trace.json")).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains("missing"), "{error}");
    std::fs::create_dir_all(&folder).unwrap();
    trace.save(&folder.join("trace.json")).unwrap();
    let text = std::fs::read_to_string(folder.join("trace.json")).unwrap();
    assert!(text.contains("aten::relu") && text.contains("\"answer\": [42]"), "{text}");
    assert!(trace.save(&folder.join("again.json")).unwrap_err().to_string().contains("already saved"));
    assert!(!trace.events().unwrap().is_empty());
    std::fs::remove_dir_all(&folder).unwrap();
}
