"""Two gloo processes that train as asked beside the one that asks; each prints how far it is off.

Run as a program: processes.py RANK PORT.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from clearhead.errors import ClearheadError
from clearhead.optim import OrthoAdam

STEPS = 4


def make_model():
    """Odd sizes, so that shards are uneven; two layers of one shape, and vectors."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 3)
    )


def make_optimizer(model, kind, **options):
    return OrthoAdam(model.named_parameters(), lr=0.02, rotation=kind, **options)


def data(step, part=None):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    return (x, y) if part is None else (x[part::2], y[part::2])


def train(model, optimizer, steps, part=None):
    for step in steps:
        x, y = data(step, part)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(what, model, reference):
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    report(what, max(float((whole(ours) - theirs.detach()).abs().max()) for ours, theirs in pairs))


def report(what, value):
    print(f"{what}\t{value}", flush=True)


def by_one(kind, steps=range(STEPS), **options):
    model = make_model()
    optimizer = make_optimizer(model, kind, **options)
    train(model, optimizer, steps)
    return model, optimizer


def main(rank):
    mesh = init_device_mesh("cpu", (2,))
    for kind in ("haar", "hadamard"):
        reference, _ = by_one(kind)
        model = DistributedDataParallel(make_model())
        train(model, make_optimizer(model, kind), range(STEPS), rank)
        compare(f"ddp {kind}", model, reference)
        model = fully_shard(make_model(), mesh=mesh)
        train(model, make_optimizer(model, kind), range(STEPS), rank)
        compare(f"fsdp {kind}", model, reference)

    reference, _ = by_one("hadamard", share="size")
    model = fully_shard(make_model(), mesh=mesh)
    train(model, make_optimizer(model, "hadamard", share="size"), range(STEPS), rank)
    compare("fsdp by size", model, reference)

    columns = make_model()
    for module in columns:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(
                distribute_tensor(module.weight.detach(), mesh, [Shard(1)])
            )
    try:
        make_optimizer(columns, "haar")
    except ClearheadError as error:
        report("sharded columns", 0.0 if "rotates whole columns" in str(error) else 1.0)

    # A state saved by shards, gathered, and given to shards again.
    reference, _ = by_one("hadamard")
    model = fully_shard(make_model(), mesh=mesh)
    optimizer = make_optimizer(model, "hadamard")
    train(model, optimizer, range(2), rank)
    full = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizer, options=full)
    optimizer.zero_grad()  # with gradients at hand PyTorch takes the new optimizer for a used one
    resumed = make_optimizer(model, "hadamard")
    everywhere = [saved]
    dist.broadcast_object_list(everywhere, src=0)
    set_optimizer_state_dict(model, resumed, everywhere[0], options=full)
    train(model, resumed, range(2, STEPS), rank)
    compare("fsdp resumed", model, reference)

    # One process meets NaN: none of them changes anything, and none waits for ever.
    before = [whole(p).clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if rank == 1:
        model[0].weight.grad.to_local().fill_(float("nan"))
    try:
        resumed.step()
    except ClearheadError as error:
        changed = max(
            float((whole(p) - old).abs().max())
            for p, old in zip(model.parameters(), before, strict=True)
        )
        report("nan", changed if "not finite" in str(error) else 1.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = int(sys.argv[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    main(rank)
    dist.barrier()
    dist.destroy_process_group()
    # At once: gloo's threads may still run, and an ordinary exit then aborts now and again.
    sys.stdout.flush()
    os._exit(0)
