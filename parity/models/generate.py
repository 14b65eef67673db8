"""Writes `logits.json`, which `crates/models/tests/parity.rs` compares with.

Run with Python's torch 2.11.0 and transformers 5.23.0 on the CPU; the file names the versions that made it.

    python parity/models/generate.py

Weights are made by a formula out of the alphabetical order of their names, so the file holds none: for each case the
configuration, names and shapes of the state dict, and what the model computes.
"""

import json
import pathlib
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

from cases import cases, formula, labels_of

FILE = pathlib.Path(__file__).parent / "logits.json"


def filled(model):
    """The model with weights by the formula, and names and shapes of its file."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = pathlib.Path(folder) / "model.safetensors"
        state = load_file(file)
        for phase, name in enumerate(sorted(state)):
            state[name] = values(name, state[name], phase)
        save_file(state, file, {"format": "pt"})
        return type(model).from_pretrained(folder).eval(), {name: list(state[name].shape) for name in sorted(state)}


def values(name, tensor, phase):
    if not tensor.is_floating_point():
        return tensor
    # A product adds up more numbers in a convolution, and scales of norms and variances are about 1.
    numbers = formula(list(tensor.shape), phase) * (0.05 if tensor.dim() == 4 else 0.25)
    is_scale = name.endswith("weight") and tensor.dim() == 1
    return numbers + 1 if is_scale or name.endswith("running_var") else numbers


def rounded(values):
    """Nine significant digits hold a float32 exactly."""
    return [float(f"{value:.9g}") for value in values]


def numbers(tensor):
    return {"shape": list(tensor.shape), "values": rounded(tensor.detach().double().flatten().tolist())}


def config_of(model):
    config = model.config.to_dict()
    # What says nothing about the model, and would change with each version.
    for key in ["transformers_version", "_name_or_path"]:
        config.pop(key, None)
    return {key: value for key, value in config.items() if value is not None or "window" in key or "token_id" in key}


def compute(make, inputs):
    torch.manual_seed(0)
    model, names = filled(make())
    case = {"config": {**config_of(model), "architectures": [type(model).__name__]}, "names": names}
    with torch.no_grad():
        case["logits"] = numbers(model(**inputs).logits)
        if "input_ids" in inputs:
            case["inputs"] = {name: tensor.tolist() for name, tensor in inputs.items()}
        if model.can_generate():
            labels = labels_of(inputs)
            labels[0, 3] = -100
            case["loss"] = float(model(**inputs, labels=labels).loss)
            # Without a mask Transformers takes tokens that equal the filler for fillers.
            mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
            if mask[:, -1].all():
                tokens = model.generate(
                    inputs["input_ids"], attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
                case["greedy"] = tokens[:, inputs["input_ids"].shape[1]:].tolist()
    if "pixel_values" in inputs:
        case["image"] = list(inputs["pixel_values"].shape)
    return case


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    content = {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "cases": {name: compute(make, inputs) for name, (make, inputs) in cases().items()},
    }
    FILE.write_text(json.dumps(content, separators=(",", ":")).replace('"},"', '"},\n"').replace('},"', '},\n"') + "\n")
