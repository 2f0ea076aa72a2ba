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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.diagnose import attention_cases as given
from clearhead.diagnose.attention_cases import LENGTHS, Answer, is_causal, is_ours, plain
from clearhead.errors import ClearheadError, first_line
from clearhead.nn.null_keys import Sink

USUAL = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "clearhead")
# On a CPU it has no gradients, and compiles for minutes.
OF_GPUS = ("flex_attention",)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Shorter than every text.
WINDOW = 6
# A logit at which a dropped sink changes everything, and one beside which keys still count.
HIGH, LOW = 20.0, 1.0
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
    exact = _copied(model, "eager", torch.float64)
    texts = given.drawn_texts(exact, LENGTHS, seed)
    checked = _Checked(exact, texts, dtype, seed)
    found: list[Implementation] = []
    for name in dict.fromkeys(("eager", *implementations)):
        try:
            candidate = _copied(model, name, dtype)
        except (ImportError, ValueError, RuntimeError, ClearheadError) as error:
            found.append(Implementation(name=name, lacks=_line(error)))
            continue
        cases = tuple(checked.cases(candidate, name, compile=compile))
        seconds, peak = _timed(candidate, timed, seed) if timed else (None, None)
        eager = seconds if name == "eager" else found[0].seconds
        times: dict[str, Any] = {"seconds": seconds, "eager_seconds": eager, "peak_bytes": peak}
        found.append(Implementation(name=name, cases=cases, **times))
    return [one for one in found if one.name in implementations]


class _Setting(NamedTuple):
    """The logit of every sink, and the window; None for low logits and for no window."""

    sink: float | None = None
    window: int | None = None


class _Checked:
    """Exact answers, each computed once, and the comparison with them."""

    def __init__(self, exact: Any, texts: list[Tensor], dtype: torch.dtype, seed: int) -> None:
        self.exact, self.texts, self.dtype = exact, texts, dtype
        self.sinks = _sinks(exact)
        draw = torch.Generator().manual_seed(seed)
        self.low = [LOW + torch.rand(one.shape, generator=draw) for one in self.sinks]
        self.answers: dict[_Setting, Answer] = {}
        self.eager: dict[str, tuple[float, float]] = {}
        self.windows = bool(_windows(exact))
        self.causal = is_causal(exact)

    def cases(self, model: Any, name: str, *, compile: bool) -> Iterator[Case]:
        ways: dict[str, Callable[..., Answer]] = {"plain": plain}
        if self.sinks:
            ways["sinks of 20"] = plain
        ways["padded"] = given.padded
        if self.causal:
            ways |= {"packed": given.packed, "cached": given.stepwise, "chunks": given.in_chunks}
        if self.windows:
            ways["windowed"] = plain
            ways |= {"windowed, cached": given.stepwise} if self.causal else {}
        if compile:
            ways["compiled"] = given.compiled
        for way, answer in ways.items():
            yield self._case(model, name, way, answer)

    def _case(self, model: Any, name: str, way: str, answer: Callable[..., Answer]) -> Case:
        at = _Setting(
            sink=HIGH if way == "sinks of 20" else None,
            window=WINDOW if way.startswith("windowed") else None,
        )
        lacking = ""
        with self._set(model, at):
            for learning in (True, False):
                try:
                    with torch.set_grad_enabled(learning):
                        found = answer(model, self.texts)
                    break
                except Exception as error:  # kernels, compilers and models each raise their own
                    if lacking:
                        return Case(name=way, right=None, what=_line(error))
                    lacking = f"no gradients: {_line(error)}"
        output, gradients = _errors(found, self._exact(at))
        gradient = max(gradients.values(), default=None)
        if name == "eager":
            self.eager[way] = output, gradient or 0.0
        usual, largest = ROUNDING[self.dtype], LARGEST[self.dtype]
        own = self.eager.get(way, (0.0, 0.0))
        bounds = [max(usual, min(EAGERS * error, largest)) for error in own]
        what = ""
        if not output <= bounds[0]:  # NaN is not
            cause = self._cause(found, bounds[0], at) or self._place(found, self._exact(at), way)
            what = f"{cause}, output off by {output:.1%}" if cause else f"off by {output:.1%}"
        elif wrong := [one for one, error in gradients.items() if not error <= bounds[1]]:
            kinds = _of_last_layer(wrong)
            what = f"output right, gradient of {', '.join(kinds)} off by {gradient:.1%}"
            if self.sinks and "v_proj" not in kinds:
                what += ", as where a sink goes through a log-sum-exp without its gradient"
        errors: dict[str, Any] = {"output": output, "gradient": gradient}
        return Case(name=way, right=not what, what=what or lacking, **errors)

    def _exact(self, at: _Setting) -> Answer:
        if at not in self.answers:
            with self._set(self.exact, at):
                self.answers[at] = plain(self.exact, self.texts)
        return self.answers[at]

    def _cause(self, found: Answer, bound: float, at: _Setting) -> str:
        """The part left out, where the logits are those of a model without it."""
        without: dict[str, _Setting] = {}
        if self.sinks:
            without["the sink is ignored"] = at._replace(sink=DROPPED)
        if at.window is not None:
            without["the window is ignored"] = at._replace(window=None)
        if self.sinks and at.window is not None:
            without["the sink and the window are ignored"] = _Setting(sink=DROPPED)
        near = (
            one for one, other in without.items() if _errors(found, self._exact(other))[0] <= bound
        )
        return next(near, "")

    def _place(self, found: Answer, exact: Answer, way: str) -> str:
        """Where an output is wrong, when another part of it is right."""
        usual, parts = ROUNDING[self.dtype], []
        for one, other in zip(found.logits, exact.logits, strict=True):
            errors_T = (one - other).norm(dim=-1) / other.norm(dim=-1)
            parts.append((bool((errors_T[:4] <= usual).all()), bool((errors_T <= usual).all())))
        if way == "packed" and parts[0][1]:
            return "texts see those packed before them"
        if way == "padded" and parts[1][1]:
            return "tokens before a text are not hidden"
        if way in ("cached", "chunks") and all(first for first, _ in parts):
            return "later tokens read the cache wrongly"
        return ""

    @contextmanager
    def _set(self, model: Any, at: _Setting) -> Iterator[None]:
        before = _windows(model)
        for one, key, _ in before:
            setattr(one, key, sum(LENGTHS) + 1 if at.window is None else at.window)
        with torch.no_grad():
            for parameter, low in zip(_sinks(model), self.low, strict=True):
                parameter.copy_(low if at.sink is None else torch.full_like(low, at.sink))
        try:
            yield
        finally:
            for one, key, now in before:
                setattr(one, key, now)


def _errors(found: Answer, exact: Answer) -> tuple[float, dict[str, float]]:
    """‖error‖ / ‖exact‖ of the logits, and of each parameter's gradient.

    A gradient that is all but nothing, such as that of a key's bias, is measured by a thousandth of
    the largest: its own size is rounding.
    """
    pairs = list(zip(found.logits, exact.logits, strict=True))
    size = torch.cat([one for _, one in pairs]).norm().item()
    output = torch.cat([one - other for one, other in pairs]).norm().item() / size
    if not found.gradients:
        return output, {}
    least = 1e-3 * max(one.norm().item() for one in exact.gradients.values())
    zero = torch.zeros(())
    return output, {
        name: (found.gradients.get(name, zero) - one).norm().item() / max(one.norm().item(), least)
        for name, one in exact.gradients.items()
    }


def _timed(model: Any, length: int, seed: int) -> tuple[float | None, int | None]:
    """Median seconds of a forward and backward pass of one text, and the memory that it takes."""
    (ids,) = given.drawn_texts(model, (length,), seed)
    on_cuda, seconds, before = model.device.type == "cuda", [], 0
    try:
        for _ in range(4):
            if on_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            given.logits(model, ids[None]).float().sum().backward()
            if on_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            model.zero_grad(set_to_none=True)
    except Exception:  # the cases have said why
        return None, None
    peak = torch.cuda.max_memory_allocated() - before if on_cuda else None
    return statistics.median(seconds[1:]), peak


def _copied(model: Any, name: str, dtype: torch.dtype) -> Any:
    if name == "clearhead" and is_ours(model):
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


def in_words(found: Sequence[Implementation]) -> list[str]:
    """A line for each implementation, and one for each cause of its errors."""
    return [f"{one.name}: {_said(one)}" for one in found]


def _said(one: Implementation) -> str:
    if one.lacks:
        return f"does not load here ({one.lacks})"
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
    return "; ".join(parts)
