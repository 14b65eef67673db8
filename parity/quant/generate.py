"""Weights that bitsandbytes has quantised and saved, and what its layers compute with them, for crates/accelerate/tests/quant_parity.rs.

Run it with TORCHDYNAMO_DISABLE=1 and one thread. It writes, beside itself, `source.safetensors` and for each case
`<case>.safetensors` in bitsandbytes' layout with `<case>.expected.safetensors`: an input, outputs in both modes, and the gradient
of the input for a gradient of ones.
"""

import pathlib

import bitsandbytes as bnb
import torch
from safetensors.torch import save_file

FOLDER = pathlib.Path(__file__).parent
# Name, type of four bits, double quantisation, block size, type of the weights.
FOUR_BIT = [
    ("nf4", "nf4", False, 64, torch.float32),
    ("nf4_double", "nf4", True, 32, torch.bfloat16),
    ("fp4_double", "fp4", True, 64, torch.float32),
    ("fp4", "fp4", False, 128, torch.float16),
    ("nf4_large", "nf4", False, 4096, torch.float32),
]


def four_bit(weight, bias, quant_type, double, block_size, dtype):
    layer = bnb.nn.Linear4bit(
        weight.shape[1], weight.shape[0], True, compute_dtype=torch.float32, compress_statistics=double, quant_type=quant_type
    )
    layer.weight = bnb.nn.Params4bit(
        weight.to(dtype), requires_grad=False, compress_statistics=double, quant_type=quant_type, blocksize=block_size, module=layer
    )
    layer.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
    # `to` makes the codes.
    return layer.to("cpu")


def int8(weight, bias, threshold):
    layer = bnb.nn.Linear8bitLt(weight.shape[1], weight.shape[0], True, has_fp16_weights=False, threshold=threshold)
    layer.weight = bnb.nn.Int8Params(weight.half(), requires_grad=False, has_fp16_weights=False)
    layer.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
    return layer.to("cpu")


def expected(layer, x):
    found = {"input": x.clone()}
    for rows in (1, x.shape[0]):
        some = x[:rows].clone().requires_grad_(True)
        layer.train()
        output = layer(some)
        output.sum().backward()
        found[f"train_{rows}"] = output.detach()
        found[f"gradient_{rows}"] = some.grad.clone()
        if isinstance(layer, bnb.nn.Linear8bitLt):
            layer.eval()
            found[f"eval_{rows}"] = layer(x[:rows]).detach()
    return found


def main():
    torch.manual_seed(7)
    torch.set_num_threads(1)
    # Two blocks of nested scales with a block size of 32, and rows that begin with a block; an odd number of elements.
    weights = {
        "wide": (torch.randn(80, 128) * 0.05, torch.randn(80) * 0.1),
        "odd": (torch.randn(7, 9) * 0.05, torch.randn(7) * 0.1),
    }
    weights["wide"][0][3, 10:74] = 0
    source = {f"{name}.{part}": tensor for name, parts in weights.items() for part, tensor in zip(("weight", "bias"), parts)}
    save_file(source, FOLDER / "source.safetensors")
    inputs = {name: torch.randn(6, parts[0].shape[1]) for name, parts in weights.items()}
    inputs["wide"][4, 17] = 8.5
    cases = {name: lambda w, b, options=options: four_bit(w, b, *options) for name, *options in FOUR_BIT}
    cases["int8"] = lambda w, b: int8(w, b, 6.0)
    cases["int8_no_outliers"] = lambda w, b: int8(w, b, 0.0)
    for case, make in cases.items():
        state, wanted = {}, {}
        for name, (weight, bias) in weights.items():
            layer = make(weight, bias)
            state |= {f"{name}.{part}": tensor.clone() for part, tensor in layer.state_dict().items()}
            wanted |= {f"{name}.{what}": tensor for what, tensor in expected(layer, inputs[name]).items()}
        save_file(state, FOLDER / f"{case}.safetensors", metadata={"format": "pt"})
        save_file(wanted, FOLDER / f"{case}.expected.safetensors")


main()
