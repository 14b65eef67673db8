"""Writes what PyTorch's DDP communication hooks leave in the parameters, for the Rust tests.

Run with torch 2.11.0:  python parity/comm_hooks/generate.py
Output (committed): comm_hooks.json, beside this file.

Two ranks train a three-layer network for six steps. Weights and rows are fractions that both languages
compute exactly, so nothing but the hooks is compared.
"""

import json
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

HERE = pathlib.Path(__file__).parent
NUM_STEPS = 6
LAYERS = [(8, 10), (10, 10), (10, 10), (10, 4)]

POWER_SGD = {"start_powerSGD_iter": 2, "min_compression_rate": 1.0}
CASES = {
    "fp16": ("fp16", "no", {}),
    "bf16": ("bf16", "no", {}),
    "power_sgd_rank_1": ("power_sgd", "no", POWER_SGD),
    "power_sgd_rank_2_seeded": (
        "power_sgd", "no", POWER_SGD | {"matrix_approximation_rank": 2, "random_seed": 7, "orthogonalization_epsilon": 1e-8},
    ),
    "power_sgd_rank_4_qr": ("power_sgd", "no", POWER_SGD | {"matrix_approximation_rank": 4}),
    "power_sgd_batches_shapes": ("power_sgd", "no", POWER_SGD | {"batch_tensors_with_same_shape": True}),
    "power_sgd_forgets": (
        "power_sgd", "no",
        {"start_powerSGD_iter": 0, "min_compression_rate": 1.0, "warm_start": False, "use_error_feedback": False},
    ),
    "power_sgd_in_bf16": ("power_sgd", "bf16", POWER_SGD),
    "power_sgd_in_fp16": ("power_sgd", "fp16", POWER_SGD),
    "batched_power_sgd": ("batched_power_sgd", "no", POWER_SGD),
    "batched_power_sgd_rank_3": ("batched_power_sgd", "no", POWER_SGD | {"matrix_approximation_rank": 3}),
}


def fractions(count, salt):
    """`count` fractions between -1/2 and 1/2, exact in float32's neighbourhood of both languages."""
    return torch.tensor([((i * 37 + salt * 11) % 101) / 101 - 0.5 for i in range(count)], dtype=torch.float64).float()


def accept_two_dimensions():
    """torch 2.11.0's batched hook passes matrices to a function that asserts batches of matrices."""
    original = powerSGD_hook._orthogonalize

    def orthogonalize(matrices, epsilon=0):
        original(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)

    powerSGD_hook._orthogonalize = orthogonalize


def register(model, hook, wrapper, options):
    hooks = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "power_sgd": powerSGD_hook.powerSGD_hook,
        "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers = {"fp16": default_hooks.fp16_compress_wrapper, "bf16": default_hooks.bf16_compress_wrapper}
    function = hooks[hook]
    if wrapper != "no":
        function = wrappers[wrapper](function)
    state = powerSGD_hook.PowerSGDState(None, **options) if "power" in hook else None
    model.register_comm_hook(state, function)


def train(rank, case):
    layers = []
    for inputs, outputs in LAYERS:
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for salt, parameter in enumerate(model.parameters()):
            parameter.copy_(fractions(parameter.numel(), salt).view_as(parameter))
    replicated = DistributedDataParallel(model)
    register(replicated, *case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    for step in range(NUM_STEPS):
        rows = fractions(8 * LAYERS[0][0], 100 + 10 * step + rank).view(8, LAYERS[0][0])
        targets = fractions(8 * LAYERS[-1][1], 200 + 10 * step + rank).view(8, LAYERS[-1][1])
        ((replicated(rows) - targets) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [[float(f"{value:.9g}") for value in parameter.detach().flatten()] for parameter in model.parameters()]


def run(rank, folder):
    torch.set_num_threads(1)
    accept_two_dimensions()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {name: train(rank, case) for name, case in CASES.items()}
    if rank == 0:
        document = {
            name: {"comm_hook": hook, "comm_wrapper": wrapper, "comm_state_option": options, "parameters": results[name]}
            for name, (hook, wrapper, options) in CASES.items()
        }
        (HERE / "comm_hooks.json").write_text(json.dumps(document) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (folder,), nprocs=2)
