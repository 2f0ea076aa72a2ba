"""Test of a model's attention implementations against its own eager attention in float64.

In each of `WAYS` every text must have the same logits and gradients as when it is run alone. Sinks
and windows are set so that omitting them shows: fused kernels have silently dropped both.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from clearhead.diagnose.attention_cases import LENGTHS, WAYS, Answer, Texts, Way
from clearhead.errors import ClearheadError, first_line
from clearhead.models.base_model import ClearheadModel
from clearhead.nn.null_keys import Sink
from clearhead.train.memory import PeakMemory

USUAL = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "clearhead")
OF_GPUS = ("flex_attention",)  # on a CPU it has no gradients, and compiles for minutes
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOW = 1.0  # a sink's logit beside which keys still count
# Errors, ‖error‖ / ‖exact‖, that are always rounding; and those that may be, where they are no more
# than EAGERS times what eager attention has in the same dtype.
ROUNDING = {torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
LARGEST = {torch.float32: 5e-3, torch.bfloat16: 2e-1, torch.float16: 5e-2}
EAGERS = 4.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """Result of an implementation in one of `WAYS`: `right` is None where it was refused.

    `output` and `gradient` (the worst parameter's) are ‖error‖ / ‖exact‖; `what` is the error or
    the refusal.
    """

    name: str
    right: bool | None
    output: float | None = None
    gradient: float | None = None
    what: str = ""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """The cases of a value of `attn_implementation`, or why it does not load (`lacks`); time and
    device memory (on CUDA, beside the weights) of a forward and backward pass over `timed` tokens.
    """

    name: str
    cases: tuple[Case, ...] = ()
    lacks: str = ""
    seconds: float | None = None
    eager_seconds: float | None = None
    peak_bytes: int | None = None

    @property
    def wrong(self) -> tuple[Case, ...]:
        """The cases with wrong results."""
        return tuple(case for case in self.cases if case.right is False)


def check_attention(
    model: Any,
    implementations: Sequence[str] = (),
    *,
    dtype: torch.dtype = torch.float32,
    compile: bool = False,
    timed: int = 128,
    seed: int = 0,
) -> list[Implementation]:
    """Compare a model's attention implementations with its eager attention in float64.

    Args:
        model: any language model of transformers, causal or masked; it is copied, not changed.
        implementations: values of `attn_implementation`; results of those that do not load say why.
            By default the common ones, on a CPU without flex_attention.
        dtype: in which they run; float32, bfloat16 or float16.
        compile: whether the plain case is also run under `torch.compile`.
        timed: length in tokens of the text for measuring time and memory; 0 leaves that out.
        seed: of the texts' random tokens and of the sinks.

    Raises:
        ClearheadError: for a model whose attention cannot be switched.
    """
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        raise ClearheadError(
            f"the attention of {type(model).__name__} cannot be switched: give a model that uses "
            "transformers' attention interface"
        )
    on_cpu = model.device.type == "cpu"
    implementations = implementations or [x for x in USUAL if not (on_cpu and x in OF_GPUS)]
    check = _Check(_copied(model, "eager", torch.float64), dtype, seed)
    results: list[Implementation] = []
    for name in dict.fromkeys(("eager", *implementations)):
        try:
            candidate = _copied(model, name, dtype)
        except (ImportError, ValueError, RuntimeError, ClearheadError) as error:
            results.append(Implementation(name=name, lacks=_line(error)))
            continue
        seconds, peak = _timed(candidate, timed, seed) if timed else (None, None)
        cases = tuple(
            check.case(candidate, name, way)
            for way, how in WAYS.items()
            if check.can(how) and (compile or way != "compiled")
        )
        eager = seconds if name == "eager" else results[0].seconds
        costs: dict[str, Any] = {"seconds": seconds, "eager_seconds": eager, "peak_bytes": peak}
        results.append(Implementation(name=name, cases=cases, **costs))
    return [one for one in results if one.name in implementations]


class _Check:
    """Exact answers, each computed once, and the comparison with them."""

    def __init__(self, exact: Any, dtype: torch.dtype, seed: int) -> None:
        self.model, self.texts, self.dtype = exact, Texts(exact, LENGTHS, seed), dtype
        draw = torch.Generator().manual_seed(seed)
        self.low = [LOW + torch.rand(one.shape, generator=draw) for one in _sinks(exact)]
        self.has_window = bool(_windows(exact))
        self.answers: dict[Way, Answer] = {}
        self.eager: dict[str, tuple[float, float]] = {}

    def can(self, way: Way) -> bool:
        """True if the model has the sinks, the window and the direction that `way` needs."""
        known = (way.sink is None or bool(self.low)) and (way.window is None or self.has_window)
        return known and (self.texts.causal or not way.causal)

    def case(self, model: Any, implementation: str, name: str) -> Case:
        way, refusal = WAYS[name], ""
        self._set(model, way)
        for learning in (True, False):
            try:
                with torch.set_grad_enabled(learning):
                    answer = self.texts.answer(model, way.run)
                break
            except Exception as error:  # kernels, compilers and models each raise their own
                if refusal:
                    return Case(name=name, right=None, what=_line(error))
                refusal = f"no gradients: {_line(error)}"
        output, gradients = _errors(answer, self._exact(way))
        gradient = max(gradients.values(), default=None)
        if implementation == "eager":
            self.eager[name] = output, gradient or 0.0
        usual, largest = ROUNDING[self.dtype], LARGEST[self.dtype]
        bounds = [
            max(usual, min(EAGERS * error, largest)) for error in self.eager.get(name, (0.0, 0.0))
        ]
        what = ""
        if not output <= bounds[0]:  # NaN is not
            what = f"off by {output:.1%}"
        elif wrong := [key for key, error in gradients.items() if not error <= bounds[1]]:
            kinds = _of_last_layer(wrong)
            what = f"output right, gradient of {', '.join(kinds)} off by {gradient:.1%}"
            if self.low and "v_proj" not in kinds:
                what += ", as where a sink goes through a log-sum-exp without its gradient"
        errors: dict[str, Any] = {"output": output, "gradient": gradient}
        return Case(name=name, right=not what, what=what or refusal, **errors)

    def _exact(self, way: Way) -> Answer:
        """The texts alone, with the sinks and the window of a way."""
        way = Way(sink=way.sink, window=way.window)
        if way not in self.answers:
            self._set(self.model, way)
            self.answers[way] = self.texts.answer(self.model, way.run)
        return self.answers[way]

    def _set(self, model: Any, way: Way) -> None:
        """Give a copy of the model the sinks and the window of a way."""
        for owner, key in _windows(model):
            setattr(owner, key, sum(LENGTHS) + 1 if way.window is None else way.window)
        with torch.no_grad():
            for parameter, low in zip(_sinks(model), self.low, strict=True):
                parameter.copy_(low if way.sink is None else torch.full_like(low, way.sink))


def _errors(answer: Answer, exact: Answer) -> tuple[float, dict[str, float]]:
    """‖error‖ / ‖exact‖ of the logits, and of each parameter's gradient: of one that is rounding,
    such as that of a key's bias, by a thousandth of the largest gradient."""
    output = (answer.logits - exact.logits).norm().item() / exact.logits.norm().item()
    if not answer.gradients:
        return output, {}
    sizes = {name: gradient.norm().item() for name, gradient in exact.gradients.items()}
    least, zero = 1e-3 * max(sizes.values()), torch.zeros(())
    return output, {
        name: (answer.gradients.get(name, zero) - exact.gradients[name]).norm().item()
        / max(size, least)
        for name, size in sizes.items()
    }


def _timed(model: Any, length: int, seed: int) -> tuple[float | None, int | None]:
    """Seconds of a forward and backward pass of one text, and the memory that it takes on CUDA."""
    text, device = Texts(model, (length,), seed), model.device

    def step() -> None:
        text.alone(model).float().sum().backward()
        model.zero_grad(set_to_none=True)

    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    peak = PeakMemory(device)
    try:
        seconds = timer.timeit(3).median
    except Exception:  # the cases have said why
        return None, None
    return seconds, peak.bytes() - before if device.type == "cuda" else None


def _copied(model: Any, name: str, dtype: torch.dtype) -> Any:
    if name == "clearhead" and isinstance(getattr(model, "model", None), ClearheadModel):
        raise ClearheadError("left out: a model of ours has the same attention as sdpa")
    copied = copy.deepcopy(model).to(dtype).eval()
    if hasattr(copied, "set_experts_implementation"):  # grouped products know no float64
        copied.set_experts_implementation("eager")
    copied.set_attn_implementation(name)
    if copied.config._attn_implementation != name:  # it was refused with a warning
        raise ValueError(f"{type(model).__name__} does not take it")
    return copied


def _sinks(model: Any) -> list[Tensor]:
    """The learned sinks: a logit a head, by the names that the field gives them."""
    ours = {id(one.logit) for one in model.modules() if isinstance(one, Sink)}
    return [
        parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in ours or (parameter.ndim == 1 and "sink" in name.rpartition(".")[2])
    ]


def _windows(model: Any) -> list[tuple[Any, str]]:
    """Where a model keeps its window, as an object and an attribute."""
    owners = (model.config, model.config.get_text_config(), *model.modules())
    places = [(one, key) for one in owners for key in ("sliding_window", "window")]
    return [(one, key) for one, key in places if type(vars(one).get(key)) is int]


def _of_last_layer(parameters: list[str]) -> list[str]:
    """Names within the last layer of those, from where an error of the gradient went down."""
    layers = [max(map(int, re.findall(r"\b\d+\b", name)), default=-1) for name in parameters]
    own = (name for name, n in zip(parameters, layers, strict=True) if n == max(layers))
    return sorted({name.removesuffix(".weight").rpartition(".")[2] for name in own})


def _line(error: BaseException) -> str:
    return (first_line(error) or type(error).__name__)[:200]


def in_words(implementations: Sequence[Implementation]) -> list[str]:
    """A line for each implementation: its cases by result and cause."""
    lines = []
    for one in implementations:
        causes: dict[tuple[bool | None, str], list[str]] = {}
        for case in one.cases:
            causes.setdefault((case.right, case.what), []).append(case.name)
        words = {True: "right", False: "WRONG", None: "refused"}
        parts = [
            f"{words[right]}: {', '.join(names)}" + (f" ({what})" if what else "")
            for (right, what), names in causes.items()
        ]
        if one.seconds is not None:
            cost = [f"{1e3 * one.seconds:.3g} ms"]
            if one.eager_seconds is not None and one.name != "eager":
                cost.append(f"{one.seconds / one.eager_seconds:.2f} of eager's")
            if one.peak_bytes is not None:
                cost.append(f"{one.peak_bytes / 2**20:.0f} MiB")
            parts.append(", ".join(cost))
        parts = [f"does not load here ({one.lacks})"] if one.lacks else parts
        lines.append(f"{one.name}: {'; '.join(parts)}")
    return lines
