"""Writes what crates/accelerate/tests/lora.rs compares with: `lora.json` and the folders in `adapters`.

Run with the Python of `cargo xtask parity`, torch 2.11.0 and PEFT 0.21.2:

    python parity/lora/generate.py

For each case of `model.py`: the parameters that are trained, the adapter right after `get_peft_model` from one seed, the losses
of steps with AdamW, and after these the outputs of the model as it is, merged, and with its adapter disabled. The folder of the
case is what PEFT saves after the steps.
"""

import json
import pathlib
import shutil
import warnings

import peft
import torch
from torch.nn.functional import cross_entropy

import model as cases

FOLDER = pathlib.Path(__file__).parent
SEED, STEPS = 7, 6


def numbers(tensor):
    return {"shape": list(tensor.shape), "values": tensor.detach().double().flatten().tolist()}


def run(name, settings):
    torch.manual_seed(SEED)
    base = cases.model()
    # The random numbers of the base model's own initialisation are not part of the comparison.
    torch.manual_seed(SEED)
    model = peft.get_peft_model(base, peft.LoraConfig(**settings))
    initial = peft.get_peft_model_state_dict(model)
    outcome = {
        "trainable": sorted(n for n, p in model.named_parameters() if p.requires_grad),
        "initial": {key: numbers(tensor) for key, tensor in initial.items()},
        "losses": [],
    }
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, fused=True)
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = cross_entropy(model(cases.ids(step)), cases.labels(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outcome["losses"].append(loss.item())
    model.eval()
    with torch.no_grad():
        outcome["output"] = numbers(model(cases.ids(0)))
        with model.disable_adapter():
            outcome["disabled"] = numbers(model(cases.ids(0)))
        model.merge_adapter()
        outcome["merged"] = numbers(model(cases.ids(0)))
        model.unmerge_adapter()
    folder = FOLDER / "adapters" / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    return outcome


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = {
        "made_with": f"torch {torch.__version__}, peft {peft.__version__}",
        "cases": {name: run(name, settings) for name, settings in cases.CASES.items()},
    }
    (FOLDER / "lora.json").write_text(json.dumps(found, indent=1) + "\n")
