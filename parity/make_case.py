"""Writes what both sides start from: the model's configuration, its weights, and rows to train on.

    python make_case.py FOLDER [--rows N] [--seed N] [--sequence_length N]

`config.json` and `model.safetensors` are a Hugging Face model folder; `rows.safetensors` holds
`input_ids`, `attention_mask` and `labels`, int64, one row per example.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from bert import BertConfig, BertForSequenceClassification, initialise


def make_rows(config: BertConfig, rows: int, sequence_length: int, seed: int) -> dict[str, torch.Tensor]:
    """Random tokens whose label can be learned: does the row hold more small than large tokens?"""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(1, config.vocab_size, (rows, sequence_length), generator=generator)
    lengths = torch.randint(4, sequence_length + 1, (rows, 1), generator=generator)
    attention_mask = (torch.arange(sequence_length).unsqueeze(0) < lengths).long()
    input_ids = input_ids * attention_mask
    small = ((input_ids > 0) & (input_ids < config.vocab_size // 2)).sum(dim=1)
    labels = (2 * small > attention_mask.sum(dim=1)).long()
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--sequence_length", type=int, default=32)
    arguments = parser.parse_args()

    config = BertConfig()
    model = BertForSequenceClassification(config)
    initialise(model, arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "config.json").write_text(json.dumps(config.as_json(), indent=2) + "\n")
    # Files written by Hugging Face libraries carry this mark, and some readers insist on it.
    save_file(model.state_dict(), arguments.folder / "model.safetensors", metadata={"format": "pt"})
    rows = make_rows(config, arguments.rows, arguments.sequence_length, arguments.seed + 1)
    save_file({name: tensor.contiguous() for name, tensor in rows.items()}, arguments.folder / "rows.safetensors")


if __name__ == "__main__":
    main()
