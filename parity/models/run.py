"""Computes what the Rust side must reproduce for models with random weights: the Python half of `cargo xtask parity models`.

    run.py --output FOLDER

Writes a folder for each case of `cases.py`: `config.json` and `model.safetensors` as Transformers saves them, `inputs.json`, and
`theirs.json` with logits, loss, and tokens that follow, greedily and by chance.
"""

import argparse
import json
import pathlib

import torch
import transformers

from cases import cases, labels_of

MAX_NEW_TOKENS = 8
# `bench/src/bin/parity_models.rs` has these as well.
SAMPLING = dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
SEED = 5


def randomise(model):
    """Weights large enough that every part of a model shows in its logits."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or name not in model.state_dict():
            continue
        values = torch.randn_like(tensor) * (0.05 if tensor.dim() == 4 else 0.2)
        is_scale = name.endswith("weight") and tensor.dim() == 1
        with torch.no_grad():
            tensor.copy_(values.abs() + 0.5 if name.endswith("running_var") else values + 1 if is_scale else values)


def compute(model, inputs):
    outcome = {}
    with torch.no_grad():
        logits = model(**inputs).logits
        if model.can_generate():
            outcome["loss"] = float(model(**inputs, labels=labels_of(inputs)).loss)
            mask = inputs.get("attention_mask")
            # Without a mask Transformers takes tokens that equal the filler for fillers.
            text = dict(inputs, attention_mask=torch.ones_like(inputs["input_ids"]) if mask is None else mask)
            if text["attention_mask"][:, -1].all():
                length = inputs["input_ids"].shape[1]
                follow = lambda **how: model.generate(
                    **text, max_new_tokens=MAX_NEW_TOKENS, pad_token_id=0, **how)[:, length:].tolist()
                outcome["greedy"] = follow(do_sample=False)
                torch.manual_seed(SEED)
                outcome["sampled"] = follow(**SAMPLING)
            if mask is not None:
                # What fills up a row says nothing that anybody would look at.
                logits = logits[mask.bool()]
    return {"logits": logits.double().flatten().tolist(), **outcome}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for number, (name, (make, inputs)) in enumerate(cases().items()):
        torch.manual_seed(number)
        model = make().eval()
        randomise(model)
        folder = arguments.output / name
        model.save_pretrained(folder)
        lists = {key: {"shape": list(x.shape), "values": x.double().flatten().tolist()} for key, x in inputs.items()}
        (folder / "inputs.json").write_text(json.dumps(lists))
        (folder / "theirs.json").write_text(json.dumps(compute(model, inputs)))


if __name__ == "__main__":
    main()
