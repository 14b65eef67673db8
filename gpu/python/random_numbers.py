"""Prints normal numbers and what dropout leaves of ones, drawn after a seed, as one line of JSON.

    python3 random_numbers.py --device cuda --seed 1234
"""

import argparse
import json

import torch
from accelerate.utils import set_seed

COUNT, PROBABILITY = 300, 0.3


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    set_seed(arguments.seed)
    normal = torch.randn(COUNT, device=arguments.device)
    kept = torch.nn.functional.dropout(torch.ones(COUNT, device=arguments.device), PROBABILITY, training=True)
    print(json.dumps({"normal": normal.double().tolist(), "kept": kept.double().tolist()}))


if __name__ == "__main__":
    main()
