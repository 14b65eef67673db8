//! Device maps beside those of Python Accelerate, and what holds of every map.
use accelerate_core::device_map::{
    DeviceMap, DeviceMapStrategy, InferOptions, MachineMemory, MapDevice, MapTensor, MaxMemory, ModuleTree,
    SizeOptions, check_device_map, clean_device_map, get_balanced_memory, get_max_memory, infer_auto_device_map,
};
use accelerate_core::weight_files::parse_size;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// `parity/device_map/device_map.json`.
#[derive(Deserialize)]
struct Answers {
    cases: Vec<Case>,
    machines: Vec<Machine>,
    sizes: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct Case {
    tensors: Vec<(String, u64, String, bool, Option<String>)>,
    has_empty_modules: bool,
    is_drawn: bool,
    no_split: Vec<String>,
    dtype: Option<String>,
    special_dtypes: BTreeMap<String, String>,
    offload_buffers: bool,
    fallback_allocation: bool,
    clean_result: bool,
    max_memory: BTreeMap<String, u64>,
    module_bytes: BTreeMap<String, u64>,
    sequential: Map,
    balanced: Option<Map>,
    balanced_low_0: Option<Map>,
}

#[derive(Deserialize)]
struct Map {
    map: DeviceMap,
    uncovered: Vec<String>,
    buffers_without_room: bool,
    minimum_bytes: BTreeMap<String, f64>,
    max_memory: Option<BTreeMap<String, u64>>,
}

#[derive(Deserialize)]
struct Machine {
    tensors: Vec<(String, u64, String, bool, Option<String>)>,
    machine: BTreeMap<String, u64>,
    low_zero: bool,
    max_memory: BTreeMap<String, u64>,
}

fn answers() -> Answers {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../parity/device_map/device_map.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn tree(tensors: &[(String, u64, String, bool, Option<String>)]) -> ModuleTree {
    let tensors = tensors.iter().map(|(name, num_elements, dtype, is_buffer, first)| {
        let tensor = MapTensor::new(name, *num_elements, dtype).unwrap();
        MapTensor { is_buffer: *is_buffer, tied_to: first.clone(), ..tensor }
    });
    ModuleTree::new(tensors).unwrap()
}

fn budgets(max_memory: &BTreeMap<String, u64>) -> MaxMemory {
    MaxMemory::from_texts(max_memory.iter().map(|(device, bytes)| (device, bytes.to_string()))).unwrap()
}

impl Case {
    fn options(&self) -> InferOptions {
        let special = self.special_dtypes.iter().map(|(name, dtype)| (name.clone(), dtype.parse().unwrap()));
        InferOptions {
            max_memory: budgets(&self.max_memory),
            no_split_module_classes: self.no_split.clone(),
            sizes: SizeOptions {
                dtype: self.dtype.as_ref().map(|dtype| dtype.parse().unwrap()),
                special_dtypes: special.collect(),
            },
            clean_result: self.clean_result,
            offload_buffers: self.offload_buffers,
            fallback_allocation: self.fallback_allocation,
        }
    }

    fn check(&self, number: usize, tree: &ModuleTree, options: &InferOptions, wanted: &Map) {
        let found = infer_auto_device_map(tree, options);
        check_device_map(tree, &found.device_map).unwrap();
        for (name, ..) in self.tensors.iter().filter(|(name, ..)| !wanted.uncovered.contains(name)) {
            let devices = [&found.device_map, &wanted.map].map(|map| map.device_of(name));
            assert_eq!(devices[0], devices[1], "model {number}: {name}");
        }
        if !self.has_empty_modules {
            // Buffers that a split module has beside its modules are in our map, and not in theirs.
            if wanted.uncovered.is_empty() {
                assert_eq!(found.device_map, wanted.map, "model {number}");
            }
            let minimum: BTreeMap<String, f64> =
                found.minimum_bytes.iter().map(|(device, bytes)| (device.to_string(), *bytes as f64)).collect();
            assert_eq!(minimum, wanted.minimum_bytes, "model {number}");
            assert_eq!(found.buffers_without_room.is_some(), wanted.buffers_without_room, "model {number}");
        }
        self.check_promises(number, tree, options, &found.device_map);
    }

    /// What a map is for: no budget is exceeded, and tied tensors are together.
    fn check_promises(&self, number: usize, tree: &ModuleTree, options: &InferOptions, map: &DeviceMap) {
        let table = map.table(tree, &options.sizes, &options.max_memory);
        for (device, (used, budget)) in &table.devices {
            // A disk has no limit, and what the map of the reference leaves out it has not counted.
            let is_limited =
                *device != MapDevice::Disk && self.tensors.iter().all(|(_, _, _, is_buffer, _)| !is_buffer);
            assert!(!is_limited || budget.is_some_and(|budget| *used <= budget), "model {number}: {table}");
        }
        for (name, _, _, _, first) in &self.tensors {
            if let Some(first) = first {
                assert_eq!(map.device_of(name), map.device_of(first), "model {number}: {name} and {first}");
            }
        }
        assert_eq!(serde_json::from_str::<DeviceMap>(&serde_json::to_string(map).unwrap()).unwrap(), *map);
    }
}

#[test]
fn maps_are_those_of_python() {
    let (mut num_models, mut num_maps) = (0, 0);
    for (number, case) in answers().cases.iter().enumerate() {
        let (tree, options) = (tree(&case.tensors), case.options());
        for (module, bytes) in &case.module_bytes {
            // Modules without tensors are no part of the tree.
            assert_eq!(tree.module_bytes(module, &options.sizes).unwrap_or(0), *bytes, "model {number}: {module}");
        }
        case.check(number, &tree, &options, &case.sequential);
        num_maps += 1;
        for (wanted, low_zero) in [(&case.balanced, false), (&case.balanced_low_0, true)] {
            let Some(wanted) = wanted else { continue };
            let machine = MachineMemory::default();
            let found = get_balanced_memory(&tree, Some(&options.max_memory), &machine, &options, low_zero);
            assert_eq!(found, budgets(wanted.max_memory.as_ref().unwrap()), "model {number}, low_zero {low_zero}");
            case.check(number, &tree, &InferOptions { max_memory: found, ..options.clone() }, wanted);
            num_maps += 1;
        }
        num_models += usize::from(case.is_drawn);
    }
    assert!(num_models >= 60 && num_maps >= 400, "{num_models} models, {num_maps} maps");
}

#[test]
fn budgets_of_machines_are_those_of_python() {
    for row in answers().machines {
        let available_bytes = row.machine.get("cpu").copied().unwrap_or(0);
        let accelerators =
            row.machine.iter().filter_map(|(device, &bytes)| Some((device.parse().ok()?, bytes))).collect();
        let is_integrated = !row.machine.contains_key("cpu");
        let machine = MachineMemory { accelerators, available_bytes, is_integrated, has_mps: false };
        assert_eq!(get_max_memory(None, &machine), budgets(&row.machine));
        let found = get_balanced_memory(&tree(&row.tensors), None, &machine, &Default::default(), row.low_zero);
        assert_eq!(found, budgets(&row.max_memory));
    }
}

#[test]
fn sizes_are_read_as_python_reads_them() {
    for (text, bytes) in answers().sizes {
        assert_eq!(parse_size(&text).unwrap(), bytes, "{text}");
    }
    for text in ["", "GB", "-1GB", "1XB", "nan GB"] {
        assert!(MaxMemory::from_texts([("0", text)]).unwrap_err().to_string().contains("not a size"), "{text}");
    }
}

#[test]
fn devices_are_read_and_others_are_refused() {
    let rows = [("0", "0"), ("cuda:3", "3"), ("cuda", "0"), (" cpu ", "cpu"), ("disk", "disk"), ("mps", "mps")];
    for (text, shown) in rows {
        assert_eq!(text.parse::<MapDevice>().unwrap().to_string(), shown);
    }
    for text in ["", "gpu", "cuda:", "cuda:-1", "-1", "CPU:0", "meta", "1.5"] {
        let error = text.parse::<MapDevice>().unwrap_err();
        assert!(error.is_plan() && error.to_string().contains("\"disk\""), "{error}");
    }
    let error = MaxMemory::from_texts([("0", "1GB"), ("cuda:0", "2GB")]).unwrap_err();
    assert!(error.to_string().contains("twice"), "{error}");
}

#[test]
fn maps_are_cleaned_as_the_reference_cleans_them() {
    let map = |text: &str| DeviceMap::from_json(text).unwrap();
    let rows = [
        (r#"{"a": 0, "b.c": 0, "b.d": 0, "b.e": 0}"#, r#"{"": 0}"#),
        (r#"{"a": 0, "b.c": 0, "b.d": 1, "b.e": 1}"#, r#"{"a": 0, "b.c": 0, "b.d": 1, "b.e": 1}"#),
        (r#"{"a": 0, "b.c": 1, "b.d": 1, "b.e": 1}"#, r#"{"a": 0, "b": 1}"#),
        (
            r#"{"a.a": 0, "a.b.c": 0, "a.b.d": 0, "b.c.d": 1, "b.c.e": "cpu"}"#,
            r#"{"a": 0, "b.c.d": 1, "b.c.e": "cpu"}"#,
        ),
        (r#"{"a": "disk"}"#, r#"{"a": "disk"}"#),
        (r#"{"": 0}"#, r#"{"": 0}"#),
        (r#"{"layer.1": 0, "layer.10": 1, "layer.11": 1}"#, r#"{"layer.1": 0, "layer.10": 1, "layer.11": 1}"#),
        ("{}", "{}"),
    ];
    for (given, wanted) in rows {
        let cleaned = clean_device_map(&map(given));
        assert_eq!(cleaned, map(wanted), "{given}");
        assert_eq!(clean_device_map(&cleaned), cleaned);
    }
    let order = clean_device_map(&map(r#"{"z.a": 0, "z.b": 0, "b": 1, "a.x": 0, "a.y": 1}"#));
    assert_eq!(order.iter().map(|(path, _)| path).collect::<Vec<_>>(), ["z", "b", "a.x", "a.y"]);
    for wrong in
        [r#"{"a": "gpu"}"#, r#"{"a": -1}"#, r#"{"a": 0, "a": 1}"#, r#"["a"]"#, r#"{"a": null}"#, r#"{"a": 1.5}"#]
    {
        assert!(DeviceMap::from_json(wrong).is_err_and(|error| error.is_plan()), "{wrong}");
    }
}

fn small() -> ModuleTree {
    let tensors = [("embed.weight", 10), ("layers.0.weight", 20), ("layers.1.weight", 20), ("norm.weight", 5)];
    ModuleTree::new(tensors.map(|(name, num_elements)| MapTensor::new(name, num_elements, "float32").unwrap())).unwrap()
}

#[test]
fn a_map_has_to_say_where_everything_goes() {
    let map = |text: &str| DeviceMap::from_json(text).unwrap();
    assert!(check_device_map(&small(), &map(r#"{"": "cpu"}"#)).unwrap().is_empty());
    let unknown = check_device_map(&small(), &map(r#"{"embed": 0, "layers": 1, "norm": 1, "dropout": 1}"#)).unwrap();
    assert_eq!(unknown, ["dropout"]);
    let error = check_device_map(&small(), &map(r#"{"embed": 0, "layers.1": 1}"#)).unwrap_err();
    assert!(error.is_plan() && error.to_string().contains("layers.0.weight, norm.weight"), "{error}");
}

#[test]
fn names_that_cannot_be_are_refused() {
    let tensor = |name: &str| MapTensor::new(name, 1, "float32").unwrap();
    let rows: [(&[MapTensor], &str); 7] = [
        (&[tensor("a.w"), tensor("a.w")], "there twice"),
        (&[tensor("a"), tensor("a.w")], "of a tensor and of a module"),
        (&[tensor("a.w"), tensor("a")], "there twice"),
        (&[tensor("a..w")], "malformed"),
        (&[tensor("")], "malformed"),
        (&[tensor("a.w").tied_to("b.w")], "tied to `b.w`"),
        (&[tensor("a.w"), tensor("b.w").tied_to("a.w"), tensor("c.w").tied_to("b.w")], "tied to `b.w`"),
    ];
    for (tensors, wanted) in rows {
        let error = ModuleTree::new(tensors.to_vec()).unwrap_err();
        assert!(error.is_plan() && error.to_string().contains(wanted), "{error}");
    }
    assert!(MapTensor::new("a.w", 1, "float7").unwrap_err().to_string().contains("not an element type"));
    // A path as deep as somebody likes is no recursion.
    let deep = vec!["m"; 2000].join(".");
    let tree = ModuleTree::new([tensor(&deep)]).unwrap();
    assert!(infer_auto_device_map(&tree, &Default::default()).device_map.device_of(&deep).is_some());
}

#[test]
fn a_table_shows_what_goes_where() {
    let max_memory = MaxMemory::from_texts([("0", "200"), ("1", "10KB"), ("cpu", "1MB")]).unwrap();
    let asked = Some(&max_memory);
    let (inferred, budgets) =
        DeviceMapStrategy::Sequential.device_map(&small(), asked, &Default::default(), &Default::default());
    let table = inferred.device_map.table(&small(), &Default::default(), &budgets).to_string();
    let wanted = "module    device       bytes\n\
                  embed     0             40 B\n\
                  layers.0  0             80 B\n\
                  layers.1  1             80 B\n\
                  norm      1             20 B\n\
                  device 0: 120 B of 200 B\n\
                  device 1: 100 B of 10 KB\n\
                  device cpu: 0 B of 1 MB\n";
    assert_eq!(table, wanted);
}

#[test]
fn modules_on_the_way_to_a_large_number_stay_countable() {
    let tensors = (0..4).map(|i| MapTensor::new(&format!("l{i}.w"), u64::MAX, "complex128").unwrap());
    let tree = ModuleTree::new(tensors).unwrap();
    assert_eq!(tree.module_bytes("", &Default::default()), Some(u64::MAX));
    let max_memory: MaxMemory =
        [(MapDevice::Accelerator(0), u64::MAX), (MapDevice::Cpu, u64::MAX)].into_iter().collect();
    let options = InferOptions { max_memory, fallback_allocation: true, ..Default::default() };
    assert_eq!(infer_auto_device_map(&tree, &options).device_map, DeviceMap::all_on(MapDevice::Disk));
}
