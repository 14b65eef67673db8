"""Reads a case that `make_case.py` wrote, and builds what a training loop needs from it."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from bert import BertConfig, BertForSequenceClassification

NAMES = ("input_ids", "attention_mask", "labels")


def load_model(folder: Path) -> BertForSequenceClassification:
    values = json.loads((folder / "config.json").read_text())
    fields = {name: values[name] for name in BertConfig.__dataclass_fields__ if name in values}
    model = BertForSequenceClassification(BertConfig(num_labels=len(values["id2label"]), **fields))
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    return model


def load_rows(folder: Path, batch_size: int) -> DataLoader:
    """Batches in the order of the file: shuffling is compared elsewhere."""
    tensors = load_file(folder / "rows.safetensors")
    return DataLoader(TensorDataset(*(tensors[name] for name in NAMES)), batch_size=batch_size, shuffle=False)


def make_optimizer(name: str, parameters) -> torch.optim.Optimizer:
    """The settings of both sides; the Rust program repeats them.

    `fused=True` selects the kernel that the Rust side calls as well, so a difference is a fault and
    not rounding. It matters: a key's bias has no effect on attention, its gradient is rounding noise
    around zero, and AdamW makes whole steps of that noise. `adamw_default`, a loop over tensors, is
    for races: it is what a CPU user gets who asks for nothing.
    """
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.01, fused=True)
    adamw = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    if name == "adamw":
        return torch.optim.AdamW(parameters, **adamw, fused=True)
    if name == "adamw_default":
        return torch.optim.AdamW(parameters, **adamw)
    raise ValueError(f"unknown optimizer {name!r}; known: sgd, adamw, adamw_default")
