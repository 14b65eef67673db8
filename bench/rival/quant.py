"""Times layers of bitsandbytes with weights of 4 and 8 bits: the rival of the races of `bench quant`.

Prints one line of JSON: the median time, and the mean square of an output, from which the race checks that both sides computed the
same. Where bitsandbytes has two ways (`fused`, on processors with products of bfloat16, and numbers of the weight followed by a
product), the faster one is reported, unless `--way` names one.
"""

import argparse
import json
import statistics
import time

import bitsandbytes as bnb
import torch
from safetensors import safe_open

SIZE = 4096


def formula(shape, phase):
    """Numbers between -1 and 1 that both sides make alike."""
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count, dtype=torch.float64) * 0.7 + phase).sin().to(torch.float32).reshape(shape)


def weight():
    return formula([SIZE, SIZE], 0.0) * 0.02


def four_bit(numbers, compute_dtype):
    layer = bnb.nn.Linear4bit(
        SIZE, SIZE, False, compute_dtype=compute_dtype, compress_statistics=False, quant_type="nf4", device="meta"
    )
    layer.weight = bnb.nn.Params4bit(
        numbers, requires_grad=False, compress_statistics=False, quant_type="nf4", module=layer
    ).to("cpu")
    return layer


def int8(numbers):
    layer = bnb.nn.Linear8bitLt(SIZE, SIZE, False, has_fp16_weights=False, threshold=6.0, device="meta")
    layer.weight = bnb.nn.Int8Params(numbers.half(), requires_grad=False, has_fp16_weights=False).to("cpu")
    return layer.eval()


def timed(arguments, run):
    micros = []
    for step in range(arguments.steps):
        elapsed, output = run()
        if arguments.warmup <= step:
            micros.append(elapsed * 1e6)
    return statistics.median(micros), float(output.double().square().mean())


def forward(layer, x):
    def run():
        start = time.perf_counter()
        output = layer(x)
        return time.perf_counter() - start, output

    return run


def quantize(x):
    numbers = weight()

    def run():
        start = time.perf_counter()
        codes, state = bnb.functional.quantize_4bit(numbers, quant_type="nf4")
        elapsed = time.perf_counter() - start
        return elapsed, x @ bnb.functional.dequantize_4bit(codes, state).t()

    return run


def load(folder, x):
    def run():
        start = time.perf_counter()
        layers = {}
        with safe_open(f"{folder}/model.safetensors", framework="pt") as file:
            for name in file.keys():
                layers[name] = four_bit(file.get_tensor(name), torch.float32)
        elapsed = time.perf_counter() - start
        return elapsed, layers["layers.3.weight"](x)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["nf4", "int8", "quantize", "load"], required=True)
    parser.add_argument("--way", choices=["best", "fused"], default="best")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--folder", required=True)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    x = formula([arguments.rows, SIZE], 0.25)
    if arguments.mode == "nf4":
        fused = four_bit(weight(), torch.bfloat16).eval()
        ways = [timed(arguments, forward(fused, x.bfloat16()))]
        if arguments.way == "best":
            # In training mode codes stay as they are, and become numbers for a product.
            ways.append(timed(arguments, forward(four_bit(weight(), torch.bfloat16), x.bfloat16())))
        micros, answer = min(ways)
    elif arguments.mode == "int8":
        micros, answer = timed(arguments, forward(int8(weight()), x.bfloat16()))
    elif arguments.mode == "quantize":
        micros, answer = timed(arguments, quantize(x))
    else:
        micros, answer = timed(arguments, load(arguments.folder, x))
    print("report=" + json.dumps({"rank": 0, "micros": micros, "answer": answer}), flush=True)


if __name__ == "__main__":
    main()
