"""The Python half of `cargo xtask parity quant`.

`make` writes cases: weights, and what bitsandbytes makes of them, in its files. `compare` loads what the Rust program has saved into
layers of bitsandbytes, and prints for each case how far both sides are apart.
"""

import argparse
import itertools
import json
import pathlib

import bitsandbytes as bnb
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from safetensors.torch import load_file, save_file

SHAPES = [(64, 128), (48, 96), (7, 9), (1, 4099), (130, 256)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def cases():
    grid = itertools.product(("nf4", "fp4"), (32, 64, 128, 256, 512, 1024, 2048, 4096), (False, True), DTYPES, SHAPES)
    for quant_type, block_size, double, dtype, shape in grid:
        yield {
            "shape": shape,
            "config": {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": quant_type,
                "bnb_4bit_blocksize": block_size,
                "bnb_4bit_use_double_quant": double,
                "torch_dtype": dtype,
                "llm_int8_skip_modules": [],
            },
        }
    for threshold, dtype, shape in itertools.product((0.0, 3.0, 6.0), DTYPES, SHAPES):
        yield {
            "shape": shape,
            "config": {
                "load_in_8bit": True,
                "llm_int8_threshold": threshold,
                "torch_dtype": dtype,
                "llm_int8_skip_modules": [],
            },
        }


def layer_of(case, weight):
    config, (rows, columns) = case["config"], case["shape"]
    if config.get("load_in_8bit"):
        layer = bnb.nn.Linear8bitLt(columns, rows, False, has_fp16_weights=False, threshold=config["llm_int8_threshold"])
        layer.weight = bnb.nn.Int8Params(weight.to(DTYPES[config["torch_dtype"]]).half(), requires_grad=False, has_fp16_weights=False)
        return layer.to("cpu")
    layer = bnb.nn.Linear4bit(
        columns,
        rows,
        False,
        compress_statistics=config["bnb_4bit_use_double_quant"],
        quant_type=config["bnb_4bit_quant_type"],
    )
    layer.weight = bnb.nn.Params4bit(
        weight.to(DTYPES[config["torch_dtype"]]),
        requires_grad=False,
        compress_statistics=config["bnb_4bit_use_double_quant"],
        quant_type=config["bnb_4bit_quant_type"],
        blocksize=config["bnb_4bit_blocksize"],
        module=layer,
    )
    return layer.to("cpu")


def make(folder):
    torch.manual_seed(3)
    all_cases = list(cases())
    (folder / "cases.json").write_text(json.dumps(all_cases))
    for number, case in enumerate(all_cases):
        rows, columns = case["shape"]
        weight = torch.randn(rows, columns) * 0.1
        weight[0, : columns // 2] = 0
        x = torch.randn(5, columns)
        x[2, columns // 3] = 7.0
        x = x.to(DTYPES[case["config"]["torch_dtype"]])
        save_file({"layer.weight": weight, "input": x}, folder / f"{number}.source.safetensors")
        state = layer_of(case, weight).state_dict()
        state = {f"layer.{name}": tensor.contiguous() for name, tensor in state.items()}
        save_file(state, folder / f"{number}.python.safetensors", metadata={"format": "pt"})


def numbers_of(layer):
    """What a weight stands for, by the implementation of bitsandbytes that is right for every shape."""
    state = layer.weight.quant_state
    absmax = state.absmax
    if state.nested:
        absmax = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    packed = layer.weight.data.view(torch.uint8).reshape(-1)
    return _dequantize_4bit_compute(packed, absmax, state.code, state.blocksize, state.shape, state.dtype)


def apart(found, wanted):
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-6))


def loaded(case, state):
    """A layer of bitsandbytes with a state dict that the Rust program has saved."""
    config = case["config"]
    layer = layer_of(case, torch.zeros(case["shape"]))
    if config.get("load_in_8bit"):
        layer.load_state_dict({name: tensor for name, tensor in state.items()}, strict=True)
        return layer
    parts = {name.removeprefix("weight."): tensor for name, tensor in state.items() if name != "weight"}
    layer.weight = bnb.nn.Params4bit.from_prequantized(state["weight"], parts, device="cpu", module=layer)
    return layer


def compare(folder):
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        config = case["config"]
        theirs = load_file(folder / f"{number}.python.safetensors")
        ours = load_file(folder / f"{number}.rust.safetensors")
        results = load_file(folder / f"{number}.rust.results.safetensors")
        x = load_file(folder / f"{number}.source.safetensors")["input"]
        same = theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
        layer = loaded(case, {name.removeprefix("layer."): tensor for name, tensor in ours.items()})
        some = x.clone().requires_grad_(True)
        is_int8 = bool(config.get("load_in_8bit"))
        if is_int8:
            layer.train()
            train = layer(some)
            layer.eval()
            evaluated = layer(x.clone())
            state = layer.state
            numbers = state.CB.to(x.dtype).mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))
        else:
            # The layer itself reads the scales of other blocks where rows are no multiple of the block size.
            numbers = numbers_of(layer)
            train = torch.nn.functional.linear(some, numbers.to(x.dtype))
            evaluated = train.detach()
        train.sum().backward()
        bits = [results[f"{which}.numbers"] for which in ("own", "read")]
        differences = {
            what: max(apart(results[f"{which}.{what}"], wanted) for which in ("own", "read"))
            for what, wanted in (("train", train.detach()), ("eval", evaluated), ("gradient", some.grad))
        }
        report = {"number": number, "codes": same, "numbers": all(torch.equal(found, numbers) for found in bits)}
        print("case=" + json.dumps(report | differences), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "compare"])
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    {"make": make, "compare": compare}[arguments.what](arguments.folder)


if __name__ == "__main__":
    main()
