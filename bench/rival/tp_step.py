"""Trains a transformer whose layers ranks compute together by torch's DTensor, alone or under `fully_shard`, and reports time and
losses: the rival of `bench tp_step`.

The model is GPT-2 without dropout, of plain linear layers, and its sizes are those of `fsdp_step.py`. Each rank prints one line of
JSON, as `bench/src/bin/tp_step.rs` does.
"""

import argparse

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional

from fsdp_step import LENGTH, NUM_HEADS, NUM_LAYERS, VOCABULARY, WIDTH, initial_values, make_batch, train

HEAD_DIM = WIDTH // NUM_HEADS


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        # Queries, keys and values of one head lie side by side, so that a rank's slice is whole heads, and one product makes all.
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp_c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.mlp_c_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        packed = self.c_attn(self.ln_1(x)).unflatten(2, (-1, 3, HEAD_DIM))
        q, k, v = packed.permute(3, 0, 2, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).flatten(2, 3))
        return x + self.mlp_c_proj(functional.gelu(self.mlp_c_fc(self.ln_2(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, tokens_of_rank):
        super().__init__()
        # Where ranks divide the tokens between layers: this rank's number, and the number of ranks.
        self.tokens_of_rank = tokens_of_rank
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        rank, num_ranks = self.tokens_of_rank
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]).chunk(num_ranks)[rank])
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def fill(model):
    """The values of the other program, where GPT-2 keeps the weights of its linear layers transposed."""
    with torch.no_grad():
        for index, (path, param) in enumerate(model.named_parameters()):
            if param.dim() == 1 or path in ("wte.weight", "wpe.weight"):
                values = initial_values(path, param.shape, index)
            else:
                values = initial_values(path, param.shape[::-1], index).t()
            if path.endswith("c_attn.weight"):
                values = values.unflatten(0, (3, NUM_HEADS, HEAD_DIM)).transpose(0, 1).flatten(0, 2)
            param.copy_(values)


def make_model(mesh, is_sharded, divides_tokens):
    tp = mesh["tp"]
    model = Transformer((tp.get_local_rank(), tp.size()) if divides_tokens else (0, 1))
    fill(model)
    between = Shard(1) if divides_tokens else Replicate()
    plan = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "h.*.c_attn": ColwiseParallel(input_layouts=between),
        "h.*.c_proj": RowwiseParallel(output_layouts=between),
        "h.*.mlp_c_fc": ColwiseParallel(input_layouts=between),
        "h.*.mlp_c_proj": RowwiseParallel(output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if divides_tokens:
        plan |= {"h.*.ln_1": SequenceParallel(), "h.*.ln_2": SequenceParallel(), "ln_f": SequenceParallel()}
    parallelize_module(model, mesh["tp"], plan)
    # Each of the two layers has divided a weight of its own.
    model.lm_head.weight = model.wte.weight
    if is_sharded:
        for block in model.h:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, required=True)
    parser.add_argument("--tensor_parallel_degree", type=int, required=True)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--sequence_parallel", action="store_true")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    arguments = parser.parse_args()

    torch.distributed.init_process_group("gloo")
    degree = arguments.tensor_parallel_degree
    shape = (torch.distributed.get_world_size() // degree, degree)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = make_model(mesh, arguments.fsdp, arguments.sequence_parallel)
    params = list(model.parameters())
    # The fused kernel takes DTensors or plain tensors, not both in one call.
    divided = [param for param in params if isinstance(param, DTensor)]
    replicated = [param for param in params if not isinstance(param, DTensor)]
    groups = [{"params": params} for params in (divided, replicated) if params]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.01, fused=True)
    # The same on ranks that compute layers together.
    tokens, _ = make_batch("transformer", arguments.batch_size, mesh["dp"].get_local_rank())
    train(optimizer, lambda: model(tokens), arguments.steps, arguments.warmup)


if __name__ == "__main__":
    main()
