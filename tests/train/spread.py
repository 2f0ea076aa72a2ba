"""One of several gloo processes that train together, as a list of requests says.

Run as a program, with torchrun's environment: spread.py FOLDER REQUESTS, where REQUESTS is JSON.
Answers go to FOLDER/answers-RANK.json, one a request: the error's line and what was seen. With
torchrun's options after them it is torchrun, whose processes are forks of it: no imports.
"""

import ctypes
import importlib.util
import json
import math
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from clearhead import ClearheadForCausalLM, preset
from clearhead.errors import ClearheadError
from clearhead.optim import OrthoAdam
from clearhead.train import Callback, train
from clearhead.train.world import joined

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)


def make_model(name=None, **overrides):
    """Of two layers; the llama, or a preset of ours."""
    if name is None:
        return tiny.make_model(**{"attention_dropout": 0.0, **overrides})
    torch.manual_seed(7)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "vocab_size": tiny.VOCABULARY}
    return ClearheadForCausalLM(preset(name, **{**shape, **heads, **overrides}))


class Batches(tiny.Batches):
    """Those of `tiny`; labels of some rows left out, or something happens in one process."""

    def __init__(self, ask, rank, folder):
        super().__init__(size=ask.get("config", {}).get("batch_size", 2))
        self.unlabelled = ask.get("unlabelled")
        self.events = ask.get("events", {}).get(str(rank), {})
        self.mark = folder / "killed"

    def batch(self, step):
        batch = super().batch(step)
        if self.unlabelled:
            batch["labels"][: 1 + step % 2, 3 * step :] = -100
        event = self.events.get(str(step))
        if event == "hang":
            time.sleep(600)
        elif event == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        elif event == "kill" and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


class Losses(Callback):
    def __init__(self):
        self.lines = []

    def step(self, metrics):
        self.lines.append(metrics.loss)


def spoil(model, call):
    """Make the loss of that forward pass, counted from 1, NaN."""
    left = call

    def hook(module, inputs, output):
        nonlocal left
        left -= 1
        if left == 0:
            output.loss = output.loss * math.nan
        return output

    model.register_forward_hook(hook)


def serve(ask, folder, rank):
    """Train as asked; what came of it."""
    model = make_model(**ask.get("model", {}))
    if ask.get("nan_in") == rank:
        spoil(model, 6)
    config = ask.get("config", {}) | ask.get("config_of", {}).get(str(rank), {})
    losses = Losses()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ask.get("full_in") == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ask["room"], limits[1]))
    answer = {"error": None, "elsewhere": None, "steps": None}
    try:
        batches, resume = Batches(ask, rank, folder), ask.get("resume", False)
        how = {"output": folder / ask["output"], "resume": resume, "callbacks": [losses]}
        result = train(model, batches, tiny.make_config(**config), **how)
        answer["steps"] = result.steps
    except ClearheadError as error:
        answer |= {"error": str(error), "elsewhere": error.printed_elsewhere}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return {**answer, "losses": losses.lines}


def small():
    """Odd sizes, so that shards are uneven; two layers of one shape, and vectors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), *(nn.Linear(7, n) for n in (7, 7, 3)))


def rotating(model, kind="hadamard", **options):
    return OrthoAdam(model.named_parameters(), lr=0.02, rotation=kind, **options)


def learn(model, optimizer, steps=range(4), rows=slice(None)):
    """A loop of one's own, on these rows of each batch."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
        optimizer.zero_grad()
        (model(x[rows]) - y[rows]).square().mean().backward()
        optimizer.step()
    whole = (p.detach() for p in model.parameters())
    return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in whole]


def apart(ours, theirs):
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def own_loops(rank):
    """How far OrthoAdam in two processes is from one, in loops of one's own."""
    mesh, rows, off = init_device_mesh("cpu", (2,)), slice(rank, None, 2), {}
    ways = {"ddp": DistributedDataParallel, "fsdp": lambda model: fully_shard(model, mesh=mesh)}
    for how in ({"kind": "haar"}, {"kind": "hadamard"}, {"share": "size"}):
        model = small()
        wanted = learn(model, rotating(model, **how))
        for name, spread in ways.items():
            model = spread(small())
            found = learn(model, rotating(model, **how), rows=rows)
            off[f"{name}, {how}"] = apart(found, wanted)

    # A state saved by shards, gathered, and given to shards again.
    model = small()
    wanted, full = learn(model, rotating(model)), states.StateDictOptions(full_state_dict=True)
    model = fully_shard(small(), mesh=mesh)
    optimizer = rotating(model)
    learn(model, optimizer, range(2), rows)
    saved = [states.get_optimizer_state_dict(model, optimizer, options=full)]
    optimizer.zero_grad()  # with gradients at hand PyTorch takes the new optimizer for a used one
    resumed = rotating(model)
    dist.broadcast_object_list(saved, src=0)
    states.set_optimizer_state_dict(model, resumed, saved[0], options=full)
    before = learn(model, resumed, range(2, 4), rows)
    off["resumed"] = apart(before, wanted)

    # One process meets NaN: none of them changes anything, and none waits for ever.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if rank == 1:
        model[0].weight.grad.to_local().fill_(float("nan"))
    errors = []
    columns = nn.Linear(7, 7)
    sharded = distribute_tensor(columns.weight.detach(), mesh, [Shard(1)])
    columns.weight = nn.Parameter(sharded)
    for job in (resumed.step, lambda: rotating(columns)):
        try:
            job()
        except ClearheadError as error:
            errors.append(str(error))
    off["after NaN"] = apart(learn(model, resumed, ()), before)
    return {"off": off, "errors": errors}


def main(folder, requests):
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    answers = []
    with joined(requests[0].get("timeout", 60)):
        for ask in requests:
            own = ask["output"] == "own loops"
            answers.append(own_loops(rank) if own else serve(ask, folder, rank))
            (folder / f"answers-{rank}.json").write_text(json.dumps(answers))


def torchrun(options, *words):
    """main(*words) in the processes of `torchrun OPTIONS`, on the host that $HOST_NETWORK names."""
    if network := os.environ.get("HOST_NETWORK"):
        with open(network) as namespace:
            assert not ctypes.CDLL(None).setns(namespace.fileno(), 0)
    config, _, _ = config_from_args(parse_args([*options, __file__]))
    config.start_method = "fork"
    elastic_launch(config, main)(*words)


if __name__ == "__main__":
    words = Path(sys.argv[1]), json.loads(sys.argv[2])
    if sys.argv[3:]:
        torchrun(sys.argv[3:], *words)
    else:
        main(*words)
        # At once: gloo's threads may still run, and an ordinary exit then aborts now and again.
        os._exit(0)
