"""One of several gloo processes that train together, as a list of requests says.

Run as a program, with torchrun's environment: spread.py FOLDER REQUESTS, where REQUESTS is JSON.
Answers go to FOLDER/answers-RANK.json, one a request: the error's line and what was seen.
"""

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

from clearhead import ClearheadForCausalLM, preset
from clearhead.errors import ClearheadError
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
            time.sleep(60)
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
        result = train(
            model,
            Batches(ask, rank, folder),
            tiny.make_config(**config),
            output=folder / ask["output"],
            resume=ask.get("resume", False),
            callbacks=[losses],
        )
        answer["steps"] = result.steps
    except ClearheadError as error:
        answer |= {"error": str(error), "elsewhere": error.printed_elsewhere}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return {**answer, "losses": losses.lines}


def main(folder, requests):
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    answers = []
    with joined(requests[0].get("timeout", 60)):
        for ask in requests:
            answers.append(serve(ask, folder, rank))
            (folder / f"answers-{rank}.json").write_text(json.dumps(answers))
    # At once: gloo's threads may still run, and an ordinary exit then aborts now and again.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
