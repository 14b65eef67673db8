"""Times tokens that GPT-2 adds to a text with Transformers: the rival of `bench generate`.

    generate.py --make FOLDER      writes the model: the sizes of GPT-2 with 124 million parameters, random weights in bfloat16
    generate.py --folder FOLDER --new_tokens N --rounds R --tokens T,T,...

Prints one line of JSON: the median time of a token, and how good the tokens of the other side are, which `--tokens` has. In bfloat16
logits are often equal or a rounding apart, so both sides may choose another token and be right. So the model judges in float32, from
the same text before each token: how far its logit is below the largest, as a part of that.
"""

import argparse
import json
import pathlib
import statistics
import time

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

# `bench/src/bin/generate.rs` has it as well.
PROMPT = [[(7919 * position) % 50257 for position in range(16)]]


def make(folder):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(eos_token_id=None, bos_token_id=None))
    with torch.no_grad():
        # A new model repeats its last token. With larger positions and layers it does not, and its choices are clear.
        model.transformer.wpe.weight.mul_(20)
        for name, param in model.named_parameters():
            if name.endswith("c_proj.weight"):
                param.mul_(20)
    model.to(torch.bfloat16).save_pretrained(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--new_tokens", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--tokens")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if arguments.make:
        make(arguments.make)
        return

    torch.set_num_threads(1)
    model = GPT2LMHeadModel.from_pretrained(arguments.folder, dtype=torch.bfloat16).eval()
    prompt, count = torch.tensor(PROMPT), arguments.new_tokens
    micros = []
    # The first round warms up.
    for number in range(arguments.rounds + 1):
        started = time.perf_counter()
        with torch.no_grad():
            # Without a mask, Transformers takes the 0 that the text begins with for padding, and moves all positions by one.
            texts = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, pad_token_id=0
            )
        if number > 0:
            micros.append((time.perf_counter() - started) / count * 1e6)
    tokens = torch.tensor([[int(token) for token in arguments.tokens.split(",")]])
    with torch.no_grad():
        logits = model.float()(torch.cat([prompt, tokens], dim=1)).logits[0, prompt.shape[1] - 1 : -1]
    largest = logits.max(dim=1).values
    shortfall = ((largest - logits.gather(1, tokens.t())[:, 0]) / largest).max().item()
    report = {"micros": statistics.median(micros), "num_tokens": texts.shape[1] - prompt.shape[1], "shortfall": shortfall}
    print("report=" + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
