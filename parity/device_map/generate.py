"""Writes device maps as Accelerate finds them, for the Rust tests.

Run with torch 2.11.0 and accelerate 1.15.0:  PYTHONHASHSEED=0 python parity/device_map/generate.py
Output (committed): device_map.json and the folder offload, beside this file.

The first models are those that Accelerate's own tests speak of. The others are random trees of modules with random sizes, types, buffers,
tied parameters and budgets. Where Accelerate raises (a tied parameter that stands outside of every module that is left), or goes by a
name that is within another name, there is nothing to compare with, and another model is drawn. No names here are within others.
"""

import json
import logging
import pathlib
import random
import warnings
from collections import OrderedDict

import torch
from accelerate.utils import modeling, offload
from torch import nn

HERE = pathlib.Path(__file__).parent
NUM_RANDOM = 150
TYPES = [torch.float32] * 4 + [torch.float16, torch.bfloat16, torch.float64]
RAISED = (IndexError, KeyError, AttributeError, RuntimeError)
BUFFER_TYPES = [torch.float32, torch.float32, torch.int64, torch.uint8, torch.int32]


class Plain(nn.Module):
    pass


class Block(nn.Module):
    pass


class Layer(nn.Module):
    pass


CLASSES = {"part": Plain, "block": Block, "layer": Layer}


class Small(nn.Module):
    """Linear, normalisation, linear: 64, 72 and 100 bytes."""

    def __init__(self, buffers=()):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)
        for number, (module, rows) in enumerate(buffers, 1):
            getattr(self, module).register_buffer(f"test_buffer{number}", torch.zeros(10, rows))


def chain(**modules):
    return nn.Sequential(OrderedDict(modules))


def smalls(*names):
    return chain(**{name: Small() for name in names})


def tied_smalls(*pairs):
    model = smalls("layer1", "layer2", "layer3")
    for alias, first in pairs:
        target = model.get_submodule(alias.rpartition(".")[0])
        source = model.get_submodule(first.rpartition(".")[0])
        setattr(target, alias.rpartition(".")[2], getattr(source, first.rpartition(".")[2]))
    return model


def tied_linears(one, other):
    model = chain(linear1=nn.Linear(*one), linear2=nn.Linear(*other), linear3=nn.Linear(*one), linear4=nn.Linear(*other))
    model.linear3.weight, model.linear3.bias = model.linear1.weight, model.linear1.bias
    return model


def tied_in_one():
    model = nn.Module()
    model.compute = nn.Linear(3, 8)
    model.compute.weight_submodule = nn.Module()
    model.compute.weight_submodule.parameter = model.compute.weight
    return model


def tied_small():
    model = Small()
    model.linear1.weight = model.linear2.weight
    return model


def two_tied():
    model = chain(linear1=nn.Linear(10, 10), linear2=nn.Linear(10, 10))
    model.linear2.weight = model.linear1.weight
    return model


def with_linear3():
    model = Small([("linear1", 2), ("batchnorm", 3), ("linear2", 3)])
    model.linear3 = nn.Linear(4, 5)
    model.linear3.register_buffer("test_buffer4", torch.zeros(10, 2))
    return model


def buffered():
    model = chain(linear1=nn.Linear(10, 10), batchnorm=nn.BatchNorm1d(10), linear2=nn.Linear(10, 10))
    for number, module in enumerate(model.children(), 1):
        module.register_buffer(f"buffer{number}", torch.zeros(5))
    return model


def partial():
    return chain(**{
        f"module{number}": chain(submodule1=nn.Linear(20, 20), submodule2=nn.Linear(20, 20)) for number in (1, 2, 3)
    })


GB = 10**9
THREE = chain(module=chain(linear1=nn.Linear(10, 4), linear2=nn.Linear(4, 4), linear3=nn.Linear(4, 8)))
EQUAL = chain(module=chain(linear1=nn.Linear(10, 10), linear2=nn.Linear(10, 10), linear3=nn.Linear(10, 10)))
SECOND, THIRD = ("layer2.linear2.weight", "layer1.linear2.weight"), ("layer3.linear2.weight", "layer1.linear2.weight")
CHECKED = Small([("linear1", 2), ("batchnorm", 3), ("linear2", 3)])
OF_THE_TESTS = [
    (Small(), {0: 200, 1: 200}, {}),
    (Small(), {0: 200, 1: 172, 2: 200}, {}),
    (tied_small(), {0: 200, 1: 200}, {}),
    (nn.Sequential(Small(), Small(), Small()), {0: 500, 1: 500}, {}),
    (nn.Sequential(Small(), Small(), Small()), {0: 500, 1: 500}, {"no_split_module_classes": {"Small": "*"}}),
    (tied_smalls(THIRD), {0: 400, 1: 500}, {}),
    (tied_smalls(THIRD, SECOND), {0: 400, 1: 500}, {}),
    (tied_smalls(THIRD, SECOND, ("layer2.linear1.weight", "layer1.linear1.weight")), {0: 400, 1: 500}, {}),
    (tied_linears((4, 4), (6, 6)), {0: 250, 1: 400}, {}),
    (tied_in_one(), {0: 4, "cpu": 96000}, {}),
    (CHECKED, {0: 400, "cpu": GB}, {}),
    (CHECKED, {0: 400, "cpu": GB}, {"offload_buffers": True}),
    (with_linear3(), {0: 400, 1: 400, "cpu": GB}, {}),
    (with_linear3(), {0: 400, 1: 200, "cpu": GB}, {}),
    (with_linear3(), {0: 400, 1: 200, "cpu": GB}, {"offload_buffers": True}),
    (THREE, {0: 256}, {}),
    (THREE, {0: 256}, {"fallback_allocation": True}),
    (EQUAL, {0: 30}, {"fallback_allocation": True}),
    (partial(), {0: 5000}, {"fallback_allocation": True}),
    (two_tied(), {0: 600}, {"fallback_allocation": True}),
    (buffered(), {0: 678}, {"fallback_allocation": True}),
    (Small(), {0: 200, 2: 200}, {}),
    (Small(), {0: 300, 1: 300}, {}),
    (Small(), {0: 300, 1: 500}, {}),
    (Small(), {0: 300, "cpu": 1000}, {}),
    (Small(), {0: 0, 1: 300, 2: 300}, {}),
    (Small(), {0: 0, "cpu": 100}, {}),
    (Small(), {"mps": 300, "cpu": 1000}, {}),
    (Small(), {"cpu": 200}, {}),
    (Small(), {"cpu": 200, "disk": 5}, {"dtype": torch.float16}),
]


def random_shape(rng, scale):
    return tuple(max(1, int(scale ** rng.random())) for _ in range(rng.choice([1, 2, 2, 2, 3])))


class Drawn:
    """A random model, its sizes growing with `scale`."""

    def __init__(self, rng, scale, with_empty):
        self.rng, self.scale, self.with_empty, self.count = rng, scale, with_empty, 0
        self.model = self.module(Plain, rng.choice([1, 2, 2, 3, 3]))
        self.tie(rng.choice([0, 0, 1, 1, 2, 3]))

    def name(self, kind):
        self.count += 1
        return f"{kind}{self.count}"

    def module(self, of_class, depth):
        rng, module = self.rng, of_class()
        num_children = 0 if depth == 0 else rng.randint(1, 4)
        num_tensors = rng.randint(1, 3) if num_children == 0 else rng.choice([0, 0, 0, 1, 2])
        for _ in range(num_tensors):
            tensor = torch.empty(random_shape(rng, self.scale), dtype=rng.choice(TYPES), device="meta")
            module.register_parameter(self.name("weight"), nn.Parameter(tensor))
        if rng.random() < 0.2:
            tensor = torch.empty(random_shape(rng, self.scale), dtype=rng.choice(BUFFER_TYPES), device="meta")
            module.register_buffer(self.name("state"), tensor, persistent=rng.random() < 0.7)
        for _ in range(num_children):
            kind = rng.choice(list(CLASSES))
            module.add_module(self.name(kind), self.module(CLASSES[kind], depth - rng.choice([1, 1, 2]) if depth > 1 else 0))
            if self.with_empty and rng.random() < 0.3:
                module.add_module(self.name("activation"), nn.ReLU())
        return module

    def tie(self, count):
        places = [(module, name) for path, module in self.model.named_modules() if path for name in module._parameters]
        for _ in range(count if len(places) > 1 else 0):
            (one, first), (other, second) = self.rng.sample(places, 2)
            other._parameters[second] = one._parameters[first]


def tensors_of(model, prefix="", known=None):
    """Name, number of elements, type, whether it is a buffer, and the first name of each tensor, as a store has them."""
    known = {} if known is None else known
    for name, tensor in model._parameters.items():
        if tensor is not None:
            yield entry(prefix + name, tensor, False, known)
    for name, tensor in model._buffers.items():
        if tensor is not None:
            yield entry(prefix + name, tensor, True, known)
    for name, child in model._modules.items():
        yield from tensors_of(child, f"{prefix}{name}.", known)


def entry(name, tensor, is_buffer, known):
    first = known.setdefault(id(tensor), name)
    return [name, tensor.numel(), str(tensor.dtype).removeprefix("torch."), is_buffer, None if first == name else first]


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def infer(model, max_memory, options):
    """The map, what it leaves out, whether buffers have no room, and what devices without modules would have needed."""
    messages = Messages()
    logger = logging.getLogger("accelerate.utils.modeling")
    logger.addHandler(messages)
    logger.setLevel(logging.INFO)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = modeling.infer_auto_device_map(model, max_memory=dict(max_memory), **options)
    logger.removeHandler(messages)
    lines = [line for text in messages.texts for line in text.splitlines() if line.endswith("bytes required")]
    pairs = [line.removeprefix("  - ").removesuffix(" bytes required").split(": ") for line in lines]
    names = [name for name, *_ in tensors_of(model)]
    covered = lambda name: any(not key or name == key or name.startswith(key + ".") for key in found)
    return {
        "map": found,
        "uncovered": [name for name in names if not covered(name)],
        "buffers_without_room": any("bytes of buffer" in str(warning.message) for warning in warned),
        "minimum_bytes": {device: float(mem) for device, mem in pairs},
    }


def case(model, max_memory, options, is_drawn):
    """All answers for one model; `options` has patterns of paths by class."""
    options = dict(options)
    classes = options.pop("no_split_module_classes", {})
    types = {key: options[key] for key in ("dtype", "special_dtypes") if key in options}
    given = options | {"no_split_module_classes": list(classes)}
    balanced = {}
    for name, low_zero in (("balanced", False), ("balanced_low_0", True)):
        try:
            budgets = modeling.get_balanced_memory(model, dict(max_memory), list(classes), low_zero=low_zero, **types)
            balanced[name] = {"max_memory": budgets, **infer(model, budgets, given)}
        except RAISED:
            balanced[name] = None
    text = lambda dtype: str(dtype).removeprefix("torch.")
    return {
        "tensors": list(tensors_of(model)),
        "has_empty_modules": any(not list(tensors_of(module)) for module in model.modules()),
        "is_drawn": is_drawn,
        "no_split": list(classes.values()),
        "dtype": text(options["dtype"]) if "dtype" in options else None,
        "special_dtypes": {name: text(dtype) for name, dtype in options.get("special_dtypes", {}).items()},
        "offload_buffers": options.get("offload_buffers", False),
        "fallback_allocation": options.get("fallback_allocation", False),
        "clean_result": options.get("clean_result", True),
        "max_memory": max_memory,
        "module_bytes": dict(modeling.compute_module_sizes(model, **types)),
        "sequential": infer(model, max_memory, given),
        **balanced,
    }


def drawn_case(seed):
    rng = random.Random(seed)
    model = Drawn(rng, rng.choice([8, 40, 3000]), with_empty=seed % 6 == 0).model
    options = {}
    if rng.random() < 0.4:
        options["dtype"] = rng.choice([torch.float16, torch.bfloat16, torch.float32, torch.int8])
    if rng.random() < 0.3:
        names = [name for name, _ in model.named_parameters()]
        special = [torch.float32, torch.float16, torch.int8]
        options["special_dtypes"] = {name: rng.choice(special) for name in rng.sample(names, min(2, len(names)))}
    if rng.random() < 0.5:
        kinds = rng.sample(["block", "layer"], rng.choice([1, 2]))
        options["no_split_module_classes"] = {CLASSES[kind].__name__: f"**{kind}*" for kind in kinds}
    for switch in ("offload_buffers", "fallback_allocation"):
        if rng.random() < 0.4:
            options[switch] = True
    if rng.random() < 0.2:
        options["clean_result"] = False
    types = {key: options[key] for key in ("dtype", "special_dtypes") if key in options}
    total = modeling.compute_module_sizes(model, **types)[""]
    num_devices = rng.choice([0, 1, 1, 2, 2, 3, 4])
    max_memory = {index: int(total * rng.uniform(0.05, 2.0 / num_devices)) for index in range(num_devices)}
    if rng.random() < 0.8 or not max_memory:
        max_memory["cpu"] = int(total * rng.uniform(0.1, 1.2))
    try:
        found = case(model, max_memory, options, True)
    except RAISED:
        return None
    return found if all(isinstance(size, int) for size in found["module_bytes"].values()) else None


def machine_cases():
    """What one accelerator keeps where nobody has asked for a budget."""
    asked = modeling.get_max_memory
    for machine in ({0: 1001, "cpu": 5000}, {0: 600, 1: 600, "cpu": 5000}, {"cpu": 300}, {0: 12_345_678_909}):
        modeling.get_max_memory = lambda max_memory=None: dict(machine) if max_memory is None else asked(max_memory)
        model = nn.Sequential(Small(), Small())
        for low_zero in (False, True):
            budgets = modeling.get_balanced_memory(model, low_zero=low_zero)
            budgets = {device: int(memory) for device, memory in budgets.items()}
            yield {"tensors": list(tensors_of(model)), "machine": machine, "low_zero": low_zero, "max_memory": budgets}
    modeling.get_max_memory = asked


def offloaded():
    """Tensors of every type that a folder of offloaded weights can hold, as Accelerate writes them."""
    numbers = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 8 - 0.5
    types = ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"]
    tensors = {f"of.{name}": numbers.to(getattr(torch, name)) for name in types}
    for name in ["bool", "uint8", "int8", "int16", "int32", "int64"]:
        tensors[f"of.{name}"] = torch.arange(6).reshape(2, 1, 3).to(getattr(torch, name))
    tensors["scalar"] = torch.tensor(7)
    tensors["half_scalar"] = torch.tensor(-0.75, dtype=torch.bfloat16)
    return tensors


SIZES = ["0", "12KB", "1.5MB", "10GB", "8GiB", "1MiB", "7kib", "0.5GB", "8Gb", "100mb", "3Kb", "2.25 GIB"]


def main():
    logging.getLogger("accelerate.utils.modeling").propagate = False
    cases = [case(model, max_memory, options, False) for model, max_memory, options in OF_THE_TESTS]
    seed = 0
    while sum(case["is_drawn"] for case in cases) < NUM_RANDOM:
        cases += [found for found in [drawn_case(seed)] if found]
        seed += 1
    sizes = {text: modeling.convert_file_size_to_int(text) for text in SIZES if text != "0"}
    answers = {"cases": cases, "machines": list(machine_cases()), "sizes": sizes, "num_seeds": seed}
    path = HERE / "device_map.json"
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    rest = json.dumps({key: value for key, value in answers.items() if key != "cases"}, separators=(",", ":"))
    path.write_text('{"cases":[\n' + lines + "\n]," + rest[1:] + "\n")
    offload.offload_state_dict(HERE / "offload", offloaded())
    print(f"{len(cases)} models, {seed} seeds, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
