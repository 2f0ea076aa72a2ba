"""vLLM's tokens and log-probabilities of a saved folder beside those of its simulation.

The simulation stands beside itself in float64 too: a number next to a tie is rounded the other way
by a difference of 1e-7, and from there on the two are as far apart as two roundings.
"""

import json
import os
import statistics
import subprocess
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from clearhead.lab.saving import continuations
from clearhead.quantize import Scheme, Texts, quantized, scheme

PROGRAMS = Path(__file__).parent  # of programs that run in the servers' environment
# Layers that vLLM computes at once.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass
class Side:
    """A server with one folder, as a process that answers requests."""

    server: str
    model: str  # "original" or "repaired"
    form: str
    folder: Path
    words: list[str]
    log: Path

    @cached_property
    def process(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env={
                **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
                "OMP_NUM_THREADS": "1",
            },
        )

    def ask(self, what: str, **request: Any) -> Any:
        """The answer of the server's program to {"what": what, …}."""
        process = self.process
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps({"what": what, **request}) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError(f"{self.server} ended, see {self.log}")

    def close(self) -> None:
        if "process" in self.__dict__:
            assert self.process.stdin
            self.process.stdin.close()
            self.process.wait()
            del self.process

    @property
    def bytes(self) -> int:
        files = [self.folder] if self.folder.is_file() else self.folder.glob("*.safetensors")
        return sum(path.stat().st_size for path in files)


def agreed(
    model: Any, name: str | None, texts: Texts, prompts: Tensor, side: Side, file: Path
) -> dict[str, Any]:
    """A row: how far vLLM is from the simulation of a scheme (None: full precision).

    Beside it the simulation in float64, and full precision: equal tokens after the prompts;
    differences of log-probabilities of the simulation's tokens, read at once; the places whose
    likeliest token is another, with the simulation's largest margin there, in nats.

    Args:
        prompts: [B, T]; T tokens follow each.
        file: vLLM's inputs and outputs of the layers go there.
    """
    half = prompts.shape[1]
    with under(model, name, texts):
        rows = _continued(model, prompts)
        own = _logprobs(model, rows)
        layers = by_layer(model, side, file, rows[0].tolist()) if name else {}
    with under(model.double(), name, texts):
        wide_rows, wide = _continued(model, prompts), _logprobs(model, rows)
    full_rows, full = _continued(model.float(), prompts), _logprobs(model, rows)
    ids = rows.tolist()
    vllm = side.ask("continued", rows=prompts.tolist(), tokens=half)
    continued = {"vllm": torch.tensor(vllm), "float64": wide_rows, "full": full_rows}
    row: dict[str, Any] = {"kind": "agreement", "model": side.model, "form": side.form}
    for other, tokens in continued.items():
        equal = tokens[:, -half:] == rows[:, half:]
        row[f"{other}_equal_prompts"] = int(equal.all(1).sum())
        row[f"{other}_equal_tokens"] = float(equal.double().mean())
    forced = {"float64": _of(wide, rows), "full": _of(full, rows)}
    forced["vllm"] = -torch.tensor(side.ask("losses", rows=ids), dtype=torch.float64)
    for other, logprobs in forced.items():
        gap = logprobs - _of(own, rows)
        row[f"{other}_rms"] = float(gap.square().mean().sqrt())
        row[f"{other}_largest"] = float(gap.abs().max())
    best = own[:, :-1].topk(2, -1)
    margins = best.values[..., 0] - best.values[..., 1]
    chosen = {"float64": wide[:, :-1].argmax(-1), "full": full[:, :-1].argmax(-1)}
    chosen["vllm"] = torch.tensor(side.ask("likeliest", rows=ids))
    for other, tokens in chosen.items():
        parted = margins[tokens != best.indices[..., 0]]
        row[f"{other}_parted"] = len(parted)
        row[f"{other}_parted_margin"] = max(parted.tolist(), default=0.0)
    counts = {"prompts": len(prompts), "places": margins.numel()}
    return {**row, **counts, "median_margin": float(margins.median()), **layers}


def by_layer(model: Any, side: Side, file: Path, row: list[int]) -> dict[str, Any]:
    """How far vLLM's output of each quantised layer is from that of `model`, which is being
    simulated, for the same input: ‖difference‖/‖output‖."""
    side.ask("layers", row=row, file=str(file))
    errors = []
    with torch.no_grad():
        tensors = load_file(file)
        for layer in sorted(name.removesuffix(".x") for name in tensors if name.endswith(".x")):
            x, output = tensors[f"{layer}.x"], tensors[f"{layer}.y"]
            stem, _, last = layer.rpartition(".")
            names = [f"{stem}.{part}" for part in FUSED.get(last, (last,))]
            simulated = torch.cat([model.get_submodule(each)(x) for each in names], -1)
            errors.append(float((output - simulated).norm() / simulated.norm()))
    middle, largest = statistics.median(errors), max(errors)
    return {"layers": len(errors), "median_layer_error": middle, "largest_layer_error": largest}


def as_served(name: str) -> Scheme:
    """The scheme with codes times scales as kernels compute them, in place of `absmax`, which is
    the same but for rounding: weights of 16 bits often lie on a tie."""
    how = scheme(name)
    assert how.weights
    if how.activations is None:  # weight-only schemes are codes times scales already
        return how
    weights = replace(how.weights, quantizer="integers")
    return replace(how, weights=weights, activations=replace(how.activations, quantizer="integers"))


def under(model: Any, name: str | None, texts: Texts) -> AbstractContextManager[Any]:
    return quantized(model, as_served(name), texts) if name else nullcontext()


def _continued(model: Any, prompts: Tensor) -> Tensor:
    new = continuations(model, prompts, prompts.shape[1])
    return torch.cat([prompts, torch.tensor(new)], 1)


def _logprobs(model: Any, rows: Tensor) -> Tensor:
    """[B, T, V] after each token."""
    with torch.no_grad():
        logits: Tensor = model(rows).logits
    return logits.double().log_softmax(-1)


def _of(logprobs: Tensor, rows: Tensor) -> Tensor:
    """[B, T − 1], of each token after the first."""
    return logprobs[:, :-1].gather(-1, rows[:, 1:, None]).squeeze(-1)
