"""Writes what torchao makes of small matrices, `scales.json`: largest values, scales and codes of 8 bits, to the bit, for tests of
`crates/accelerate`.

    python generate.py    # with torch 2.11.0 and the package of requirements.txt
"""

import json
from pathlib import Path

import torch
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax, to_fp8_saturated

FORMATS = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def matrices():
    numbers = torch.arange(5 * 7, dtype=torch.float64)
    wave = ((numbers * 0.7).sin() * (numbers * 0.13).cos()).float().reshape(5, 7)
    yield "wave", wave
    for size in [1e-30, 1e-6, 1e3, 1e30]:
        yield f"wave times {size}", wave * size
    yield "rows of other sizes", wave * torch.tensor([1.0, 1e-3, 1e4, 0.0, 3e-8]).reshape(5, 1)
    yield "halfway between codes", torch.tensor([[1.0625, 1.1875, 17.0, 18.0, 0.0009765625, 448.0, -448.0]])
    yield "zeros", torch.zeros(2, 3)
    yield "infinite", torch.tensor([[1.0, float("inf")], [2.0, 3.0]])
    yield "not a number", torch.tensor([[1.0, float("nan")], [2.0, 3.0]])


def bits(tensor):
    return tensor.float().contiguous().view(torch.int32).flatten().tolist()


def cases():
    for name, matrix in matrices():
        for dtype in [torch.float32, torch.bfloat16]:
            for format_name, target in FORMATS.items():
                for dim in [None, 0, 1]:
                    given = matrix.to(dtype)
                    granularity = ScalingGranularity.TENSORWISE if dim is None else ScalingGranularity.AXISWISE
                    amax = tensor_to_amax(given, scaling_granularity=granularity, axiswise_dim=dim)
                    powers_of_two = dim is not None
                    scale = amax_to_scale(amax, target, round_scales_to_power_of_2=powers_of_two)
                    codes = to_fp8_saturated(given.float() * scale, target)
                    yield {
                        "name": name,
                        "bfloat16": dtype is torch.bfloat16,
                        "format": format_name,
                        "dim": dim,
                        "shape": list(given.shape),
                        "numbers": bits(given),
                        "amax": bits(amax),
                        "scale": bits(scale),
                        "codes": codes.view(torch.uint8).flatten().tolist(),
                    }


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(case) for case in cases())
    Path(__file__).with_name("scales.json").write_text(f"[\n{lines}\n]\n")
