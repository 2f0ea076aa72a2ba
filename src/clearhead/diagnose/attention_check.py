"""Test of a model's attention implementations, as far as they load on this machine, against its
own eager attention in float64.

The same few texts are run in several ways: one by one, padded, packed, through a cache, in chunks.
Each way must give every text the same logits, loss and gradients as when it is run alone. Sinks and
windows are set so that omitting them shows: fused kernels have silently dropped both, and a sink
applied through a log-sum-exp without its gradient is right in the forward pass and wrong in the
backward pass.
"""

import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.diagnose.attention_cases import LENGTHS, WAYS, Answer, Texts, Way
from clearhead.errors import ClearheadError, first_line
from clearhead.models.base_model import ClearheadModel
from clearhead.nn.normalizers import Sink

USUAL = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "clearhead")
# On a CPU it has no gradients, and compiles for minutes.
OF_GPUS = ("flex_attention",)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOW = 1.0  # a sink's logit beside which keys still count
DROPPED = -1e4  # the logit of a sink that takes no weight
# Errors, ‖error‖ / ‖exact‖, that are always rounding; and those that may be, where they are no more
# than EAGERS times what eager attention has in the same dtype.
ROUNDING = {torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
LARGEST = {torch.float32: 5e-3, torch.bfloat16: 2e-1, torch.float16: 5e-2}
EAGERS = 4.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """Result of an implementation in one way of running the texts.

    Attributes:
        name: plain, sinks of 20, padded, packed, cached, chunks, windowed (and cached), compiled.
        right: True, False; None where the implementation refused it.
        output, gradient: ‖error‖ / ‖exact‖ of the logits and of the worst parameter's gradient;
            None where there is none.
        what: the cause of an error if known, otherwise its location; or the refusal.
    """

    name: str
    right: bool | None
    output: float | None = None
    gradient: float | None = None
    what: str = ""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """The cases of one implementation of attention.

    Attributes:
        name: the value of `attn_implementation`.
        cases: empty if it does not load on this machine.
        lacks: reason why it does not load.
        seconds: time of a forward and backward pass over one text of `timed` tokens.
        eager_seconds: the same for eager attention.
        peak_bytes: device memory of that pass beside the weights; None except on CUDA.
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
        cases = tuple(
            check.case(candidate, name, way)
            for way, how in WAYS.items()
            if check.can(how) and (compile or way != "compiled")
        )
        seconds, peak = _timed(candidate, timed, seed) if timed else (None, None)
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
        with self._set(model, way):
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
            cause = self._left_out(answer, bounds[0], way) or self._place(answer, way)
            what = f"{cause}, output off by {output:.1%}" if cause else f"off by {output:.1%}"
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
            with self._set(self.model, way):
                self.answers[way] = self.texts.answer(self.model, way.run)
        return self.answers[way]

    def _left_out(self, answer: Answer, bound: float, way: Way) -> str:
        """The part that is ignored, if the logits are exact without it; else ""."""
        without = {
            "the sink is ignored": way._replace(sink=DROPPED),
            "the window is ignored": way._replace(window=None),
            "the sink and the window are ignored": Way(sink=DROPPED),
        }
        for cause, other in without.items():
            fits = way.window is not None or "window" not in cause
            if self.can(other) and fits and _errors(answer, self._exact(other))[0] <= bound:
                return cause
        return ""

    def _place(self, answer: Answer, way: Way) -> str:
        """The place of an error, if the rest of the output is right; else ""."""
        exact = self._exact(way).logits
        errors = (answer.logits - exact).norm(dim=-1) / exact.norm(dim=-1)
        texts = (errors <= ROUNDING[self.dtype]).split(self.texts.lengths)
        if way == WAYS["packed"] and bool(texts[0].all()):
            return "texts see those packed before them"
        if way == WAYS["padded"] and bool(texts[1].all()):
            return "tokens before a text are not hidden"
        if way in (WAYS["cached"], WAYS["chunks"]) and all(bool(one[:4].all()) for one in texts):
            return "later tokens read the cache wrongly"
        return ""

    @contextmanager
    def _set(self, model: Any, way: Way) -> Iterator[None]:
        before = _windows(model)
        for owner, key, _ in before:
            setattr(owner, key, sum(LENGTHS) + 1 if way.window is None else way.window)
        with torch.no_grad():
            for parameter, low in zip(_sinks(model), self.low, strict=True):
                parameter.copy_(low if way.sink is None else torch.full_like(low, way.sink))
        try:
            yield
        finally:
            for owner, key, window in before:
                setattr(owner, key, window)


def _errors(answer: Answer, exact: Answer) -> tuple[float, dict[str, float]]:
    """‖error‖ / ‖exact‖ of the logits, and of each parameter's gradient.

    A gradient that is all but nothing, such as that of a key's bias, is measured by a thousandth of
    the largest: its own size is rounding.
    """
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
    """Median seconds of a forward and backward pass of one text, and the memory that it takes."""
    text = Texts(model, (length,), seed)
    on_cuda, seconds, before = model.device.type == "cuda", [], 0
    try:
        for _ in range(4):
            if on_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            text.alone(model).float().sum().backward()
            if on_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            model.zero_grad(set_to_none=True)
    except Exception:  # the cases have said why
        return None, None
    peak = torch.cuda.max_memory_allocated() - before if on_cuda else None
    return statistics.median(seconds[1:]), peak


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


def _windows(model: Any) -> list[tuple[Any, str, int]]:
    """Where a model keeps its window, as an object, an attribute and its value."""
    configs = {id(one): one for one in (model.config, model.config.get_text_config())}
    owners = [*configs.values(), *model.modules()]
    names = ("sliding_window", "window")
    attributes = ((one, key, vars(one).get(key)) for one in owners for key in names)
    return [(one, key, now) for one, key, now in attributes if type(now) is int]


def _of_last_layer(parameters: list[str]) -> list[str]:
    """Names within the last layer of those, from where an error of the gradient went down."""

    def layer(name: str) -> int:
        return max((int(part) for part in name.split(".") if part.isdigit()), default=-1)

    last = max(map(layer, parameters))
    own = (name for name in parameters if layer(name) == last)
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
        lacking = f"does not load here ({one.lacks})"
        lines.append(f"{one.name}: {lacking if one.lacks else '; '.join(parts)}")
    return lines
