"""Adapters of PEFT, trained by Python Accelerate, and read from the files of the other side.

    torchrun --nproc_per_node W lora.py --cases FILE --world_size W --output FOLDER [--exchanged]

Writes `outcomes.json`: for every case the losses of all ranks, the trained adapter by the names of its file, and the outputs
of the model with it. With `--exchanged` nothing is trained: the outputs are those of a model with the adapter that the other side
has saved, and with the one that was saved here before. Reading what the Rust side wrote is the task of this comparison.
"""

import pathlib
import sys
import warnings

import peft
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.nn.functional import cross_entropy

import grid

sys.path.insert(0, str(pathlib.Path(__file__).parent / "lora"))
import model as cases  # noqa: E402

# The settings stand in `bench/src/bin/parity_lora.rs` as well.
STEPS, SEED = 16, 7


def outputs(model):
    model.eval()
    with torch.no_grad():
        return model(cases.ids(0)).double().flatten().tolist()


def loaded(folder):
    return outputs(peft.PeftModel.from_pretrained(cases.model(), folder))


def train(case, exchanged):
    warnings.simplefilter("ignore")
    if exchanged:
        return {"losses": [], "adapter": {}, "outputs": {"ours": loaded(case["ours"]), "theirs": loaded(case["theirs"])}}
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(SEED)
    model = peft.get_peft_model(cases.model(), peft.LoraConfig(**cases.CASES[case["name"]]))
    if accelerator.is_main_process:
        model.save_pretrained(case["initial"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    losses = []
    for step in range(STEPS):
        number = step * world_size + rank
        loss = cross_entropy(model(cases.ids(number)), cases.labels(number))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().double().reshape(1)).tolist())
    trained = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        trained.save_pretrained(case["theirs"])
    accelerator.wait_for_everyone()
    adapter = {key: value.double().flatten().tolist() for key, value in peft.get_peft_model_state_dict(trained).items()}
    return {"losses": losses, "adapter": adapter, "outputs": {"own": outputs(trained)}}


if __name__ == "__main__":
    grid.run(__doc__, train, "exchanged")
