//! What `Accelerator::profile` records, and where it goes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::ScriptModule;
use accelerate::profile::{KeyAveragesOptions, OnTraceReady, ProfileKwargs, SortBy};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, Error, ProfilerActivity, Result, ScheduleOption};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// There is one profiler in a process, and tests of a file may be threads.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accelerator() -> Accelerator {
    Accelerator::builder().cpu(true).build().unwrap()
}

fn work() -> Result<Tensor> {
    let x = Tensor::ones([4, 6], (Kind::Float, Device::Cpu));
    Ok(x.f_matmul(&x.f_transpose(0, 1)?)?.f_relu()?)
}

/// The events of a trace file.
fn events(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap();
    trace["traceEvents"].as_array().unwrap().clone()
}

fn event(events: &[Value], name: &str) -> Value {
    events.iter().find(|event| event["name"] == name).unwrap_or_else(|| panic!("no {name} in {events:?}")).clone()
}

fn files(folder: &Path) -> BTreeSet<String> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_trace_is_json_with_what_was_asked_for() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let plain = ProfileKwargs { output_trace_dir: Some(folder.path().join("plain")), ..Default::default() };
    let full = ProfileKwargs {
        record_shapes: Some(true),
        profile_memory: Some(true),
        with_flops: Some(true),
        output_trace_dir: Some(folder.path().join("full")),
        ..Default::default()
    };
    for kwargs in [&plain, &full] {
        let _ = accelerator().profile(kwargs.clone(), |_| work()).unwrap();
    }
    let plain = events(&folder.path().join("plain/profile_0.json"));
    let full = events(&folder.path().join("full/profile_0.json"));
    for events in [&plain, &full] {
        for name in ["aten::matmul", "aten::mm", "aten::relu", "ProfilerStep#0"] {
            event(events, name);
        }
    }
    assert_eq!(event(&full, "aten::mm")["args"]["Input Dims"], serde_json::json!([[4, 6], [6, 4]]));
    assert!(event(&plain, "aten::mm")["args"].get("Input Dims").is_none());
    let has_memory = |events: &[Value]| events.iter().any(|event| event["name"] == "[memory]");
    assert!(has_memory(&full) && !has_memory(&plain));
    let text = std::fs::read_to_string(folder.path().join("full/profile_0.json")).unwrap();
    let place = &serde_json::from_str::<Value>(&text).unwrap()["distributedInfo"];
    assert_eq!(*place, serde_json::json!({"rank": 0, "world_size": 1}));
}

#[test]
fn sums_are_those_of_the_work() {
    let _alone = alone();
    let kwargs = ProfileKwargs {
        record_shapes: Some(true),
        profile_memory: Some(true),
        with_flops: Some(true),
        ..Default::default()
    };
    let accelerator = Accelerator::builder().cpu(true).kwargs_handler(kwargs).build().unwrap();
    let (sizes, trace) = accelerator.profile(None, |_| Ok((work()?.size(), work()?.size()))).unwrap();
    assert_eq!(sizes, (vec![4, 4], vec![4, 4]));
    let averages = trace.as_ref().unwrap().key_averages(Default::default()).unwrap();
    let product = averages.get("aten::mm").unwrap();
    assert_eq!((product.count, product.flops), (2, 2 * 2 * 4 * 6 * 4));
    assert_eq!(product.self_cpu_bytes + averages.get("aten::matmul").unwrap().self_cpu_bytes, 2 * 4 * 4 * 4);
    assert!(product.self_cpu_ns > 0 && product.cpu_ns <= averages.get("aten::matmul").unwrap().cpu_ns);
    let table = averages.table(SortBy::CpuTime, 100);
    assert!(table.contains("aten::relu") && table.contains("Self CPU Mem") && table.contains("MFLOPs"), "{table}");
    assert!(!averages.table(SortBy::CpuTime, 1).contains("aten::relu"));
    let shapes = trace.unwrap().key_averages(KeyAveragesOptions { group_by_input_shape: true }).unwrap();
    assert_eq!(shapes.get("aten::mm").unwrap().input_shapes, [vec![4, 6], vec![6, 4]]);
}

#[test]
fn every_cycle_of_a_schedule_has_its_file_and_its_call() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let (seen, copies) = (seen.clone(), folder.path().join("copies"));
        std::fs::create_dir(&copies).unwrap();
        OnTraceReady::new(move |trace| {
            let relus = trace.key_averages(Default::default())?.get("aten::relu").map_or(0, |row| row.count);
            trace.export_chrome_trace(copies.join(format!("{}.json", trace.cycle())))?;
            seen.lock().unwrap().push((trace.cycle(), trace.step_num(), relus));
            Ok(())
        })
    };
    let schedule = ScheduleOption { wait: 1, warmup: 1, active: 2, repeat: 2, skip_first: 1, ..Default::default() };
    let kwargs = ProfileKwargs {
        schedule_option: Some(schedule),
        on_trace_ready: Some(handler.into()),
        output_trace_dir: Some(folder.path().join("traces")),
        ..Default::default()
    };
    let (steps, last) = accelerator()
        .profile(kwargs, |profiler| {
            for _ in 0..12 {
                let _ = work()?;
                profiler.step()?;
            }
            Ok(profiler.step_num())
        })
        .unwrap();
    assert_eq!((steps, last.map(|trace| trace.cycle())), (12, Some(1)));
    assert_eq!(*seen.lock().unwrap(), [(0, 5, 2), (1, 9, 2)]);
    let traces = folder.path().join("traces");
    assert_eq!(files(&traces), ["profile_0.json", "profile_0_cycle_1.json"].map(str::to_owned).into());
    let steps_in = |path: &Path| -> Vec<String> {
        let mut names: Vec<String> = events(path)
            .iter()
            .filter(|event| event["cat"] == "user_annotation")
            .map(|event| event["name"].as_str().unwrap().to_owned())
            .collect();
        names.sort();
        names
    };
    assert_eq!(steps_in(&traces.join("profile_0.json")), ["ProfilerStep#3", "ProfilerStep#4"]);
    assert_eq!(steps_in(&traces.join("profile_0_cycle_1.json")), ["ProfilerStep#7", "ProfilerStep#8"]);
    assert_eq!(files(&folder.path().join("copies")).len(), 2);
}

#[test]
fn a_cycle_that_the_loop_cuts_short_is_handed_over_and_none_is_none() {
    let _alone = alone();
    let schedule = ScheduleOption { wait: 2, active: 5, ..Default::default() };
    let kwargs = ProfileKwargs { schedule_option: Some(schedule), ..Default::default() };
    let steps = |count: u32| {
        let run = accelerator().profile(kwargs.clone(), |profiler| {
            for _ in 0..count {
                let _ = work()?;
                profiler.step()?;
            }
            Ok(())
        });
        run.unwrap()
            .1
            .map(|trace| trace.key_averages(Default::default()).unwrap().get("aten::mm").map_or(0, |row| row.count))
    };
    assert_eq!(steps(1), None);
    assert_eq!(steps(4), Some(2));
    assert_eq!(steps(7), Some(5), "the second cycle has not begun");
}

#[test]
fn stacks_and_modules_are_those_of_torchscript() {
    let _alone = alone();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compiled/mlp.pt");
    let model: ScriptModule = ScriptModule::load(file, Device::Cpu).unwrap();
    let x = Tensor::ones([2, 3], (Kind::Float, Device::Cpu));
    let kwargs = ProfileKwargs { with_stack: Some(true), with_modules: Some(true), ..Default::default() };
    let (_, trace) = accelerator()
        .profile(kwargs, |_| {
            let _ = accelerate::nn::Module::forward(&model, &x)?;
            work()
        })
        .unwrap();
    let events = trace.unwrap().events().unwrap();
    let linear = events.iter().find(|event| event.name == "aten::linear").unwrap();
    assert!(linear.stack.iter().any(|line| line.contains("forward")), "{linear:?}");
    assert!(linear.module_hierarchy.iter().any(|line| line.contains("hidden")), "{linear:?}");
    let from_rust = events.iter().find(|event| event.name == "aten::mm").unwrap();
    assert!(from_rust.stack.is_empty() && from_rust.module_hierarchy.is_empty(), "{from_rust:?}");
}

#[test]
fn wishes_that_cannot_be_honoured_are_errors() {
    let _alone = alone();
    let activities =
        |list: &[ProfilerActivity]| ProfileKwargs { activities: Some(list.to_vec()), ..Default::default() };
    let schedule = ScheduleOption { active: 0, ..Default::default() };
    for (kwargs, words) in [
        (activities(&[ProfilerActivity::Cpu, ProfilerActivity::Xpu]), "ProfileKwargs.activities names \"xpu\""),
        (activities(&[]), "ProfileKwargs.activities is empty"),
        (ProfileKwargs { schedule_option: Some(schedule), ..Default::default() }, "schedule_option.active is 0"),
    ] {
        let error = accelerator().profile(kwargs, |_| work()).unwrap_err();
        assert!(error.is_config() && error.to_string().contains(words), "{error}");
    }
    if !accelerate::tch::Cuda::is_available() {
        let error = accelerator().profile(activities(&[ProfilerActivity::Cuda]), |_| work()).unwrap_err();
        assert!(error.is_config() && error.to_string().contains("no CUDA device"), "{error}");
    }
    let nested = accelerator().profile(None, |_| accelerator().profile(None, |_| work())).unwrap_err();
    assert!(nested.to_string().contains("a profiler is running in this process already"), "{nested}");
}

#[test]
fn failures_inside_end_the_profile_without_a_file() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let kwargs = ProfileKwargs { output_trace_dir: Some(folder.path().to_owned()), ..Default::default() };
    let failed = accelerator().profile(kwargs, |_| -> Result<()> { Err(Error::other("no data")) });
    assert_eq!(failed.unwrap_err().to_string(), "no data");
    assert!(files(folder.path()).is_empty());
    // The profiler is free again, also for a file that is in the way of the folder.
    let blocked = folder.path().join("file");
    std::fs::write(&blocked, "").unwrap();
    let kwargs = ProfileKwargs { output_trace_dir: Some(blocked), ..Default::default() };
    let error = accelerator().profile(kwargs, |_| work()).unwrap_err();
    assert!(error.to_string().contains("file"), "{error}");
    let refusing = OnTraceReady::new(|_| Err(Error::other("not today")));
    let kwargs = ProfileKwargs { on_trace_ready: Some(refusing.into()), ..Default::default() };
    assert_eq!(accelerator().profile(kwargs, |_| work()).unwrap_err().to_string(), "not today");
    let _ = accelerator().profile(None, |_| work()).unwrap();
}
