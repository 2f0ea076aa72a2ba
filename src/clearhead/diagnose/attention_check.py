"""Is a model's attention computed as its configuration says? Every implementation that loads here,
against the model's own eager attention in float64.

The same few texts are given to the model in several ways: one by one, padded, packed, through a
cache, in chunks. Each way must give every text the logits, the loss and the gradients that it has
alone. Sinks and windows are set so that leaving them out shows: fused kernels have dropped both in
silence, and a sink that is applied through a log-sum-exp without its gradient is right forward and
wrong backward.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from clearhead.diagnose.attention_cases import (
    OF_CAUSAL,
    WAYS,
    Answer,
    answer_of,
    drawn_texts,
    is_causal,
    is_ours,
    logits_of,
)
from clearhead.errors import ClearheadError, first_line
from clearhead.nn.sink import Sink

USUAL = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "clearhead")
# On a CPU it has no gradients, and compiles for minutes.
OF_GPUS = ("flex_attention",)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Lengths of the texts: odd, and each longer than the window.
LENGTHS, WINDOW = (23, 17, 9), 6
TIMED = 128  # tokens of the text by which time is measured
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
    """One way of giving the texts, and how an implementation did in it.

    Attributes:
        name: plain, sinks of 20, padded, packed, cached, chunks, windowed (and cached).
        right: True, False; None where the implementation refused it.
        output, gradient: ‖error‖ / ‖exact‖ of the logits and of the worst parameter's gradient;
            None where there is none.
        what: the cause of an error where it is known, else where it is; or the refusal.
    """

    name: str
    right: bool | None
    output: float | None = None
    gradient: float | None = None
    what: str = ""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """The cases of one implementation of attention; `str` gives its line for people.

    Attributes:
        name: the value of `attn_implementation`.
        cases: none where it does not load here.
        lacks: why it does not.
        seconds: a forward and backward pass of one text of `TIMED` tokens; None where it has none.
        eager_seconds: the same of eager attention.
    """

    name: str
    cases: tuple[Case, ...] = ()
    lacks: str = ""
    seconds: float | None = None
    eager_seconds: float | None = None

    @property
    def wrong(self) -> tuple[Case, ...]:
        """The cases in which it computes something else."""
        return tuple(case for case in self.cases if case.right is False)

    def __str__(self) -> str:
        if self.lacks:
            return f"{self.name}: does not load here ({self.lacks})"
        causes: dict[tuple[bool | None, str], list[str]] = {}
        for case in self.cases:
            causes.setdefault((case.right, case.what), []).append(case.name)
        verdicts = {True: "right", False: "WRONG", None: "refused"}
        parts = [
            f"{verdicts[right]}: {', '.join(names)}" + (f" ({what})" if what else "")
            for (right, what), names in causes.items()
        ]
        if self.seconds is not None:
            parts.append(f"{1e3 * self.seconds:.3g} ms")
            if self.eager_seconds is not None and self.name != "eager":
                parts[-1] += f", {self.seconds / self.eager_seconds:.2f} of eager's"
        return f"{self.name}: {'; '.join(parts)}"


def check_attention(
    model: Any, implementations: Sequence[str] = (), *, dtype: torch.dtype = torch.float32
) -> list[Implementation]:
    """Compare a model's attention implementations with its eager attention in float64.

    Args:
        model: any language model of transformers, causal or masked; it is copied, not changed.
        implementations: values of `attn_implementation`; one that does not load here says why. By
            default those usual in the field, on a CPU without flex_attention.
        dtype: in which they run; float32, bfloat16 or float16.

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
    check = _Check(_copied(model, "eager", torch.float64), dtype)
    checked: list[Implementation] = []
    for name in dict.fromkeys(("eager", *implementations)):
        try:
            candidate = _copied(model, name, dtype)
        except (ImportError, ValueError, RuntimeError, ClearheadError) as error:
            checked.append(Implementation(name=name, lacks=_reason(error)))
            continue
        cases = tuple(check.case(candidate, name, way) for way in check.ways)
        seconds = _timed(candidate)
        eager = seconds if name == "eager" else checked[0].seconds
        times: dict[str, Any] = {"seconds": seconds, "eager_seconds": eager}
        checked.append(Implementation(name=name, cases=cases, **times))
    return [one for one in checked if one.name in implementations]


class _Setting(NamedTuple):
    """The logit of every sink, and the window; None for low logits and for no window."""

    sink: float | None = None
    window: int | None = None


class _Check:
    """Exact answers, each computed once, and the comparison with them."""

    def __init__(self, exact: Any, dtype: torch.dtype) -> None:
        self.exact, self.dtype = exact, dtype
        self.texts = drawn_texts(exact, LENGTHS)
        draw = torch.Generator().manual_seed(0)
        self.low = [LOW + torch.rand(one.shape, generator=draw) for one in _sinks(exact)]
        self.answers: dict[_Setting, Answer] = {}
        self.eager: dict[str, tuple[float, float]] = {}

    @property
    def ways(self) -> list[str]:
        """The names of the cases that this model can be given."""
        lacking: tuple[str, ...] = () if is_causal(self.exact) else OF_CAUSAL
        lacking += () if self.low else ("sinks of 20",)
        lacking += () if _windows(self.exact) else ("windowed", "windowed, cached")
        return [way for way in WAYS if way not in lacking]

    def case(self, model: Any, name: str, way: str) -> Case:
        """One way of giving the texts to one implementation."""
        at = _Setting(
            sink=HIGH if way == "sinks of 20" else None,
            window=WINDOW if way.startswith("windowed") else None,
        )
        lacking = ""
        with self._set(model, at):
            for learning in (True, False):
                try:
                    with torch.set_grad_enabled(learning):
                        answer = answer_of(model, self.texts, way)
                    break
                except Exception as error:  # kernels, compilers and models each raise their own
                    if lacking:
                        return Case(name=way, right=None, what=_reason(error))
                    lacking = f"no gradients: {_reason(error)}"
        output, gradients = answer.errors(self._exact(at))
        gradient = max(gradients.values(), default=None)
        if name == "eager":
            self.eager[way] = output, gradient or 0.0
        usual, largest = ROUNDING[self.dtype], LARGEST[self.dtype]
        own = self.eager.get(way, (0.0, 0.0))
        bounds = [max(usual, min(EAGERS * error, largest)) for error in own]
        what = ""
        if not output <= bounds[0]:  # NaN is not
            cause = self._cause(answer, bounds[0], at) or self._place(answer, self._exact(at), way)
            what = f"{cause}, output off by {output:.1%}" if cause else f"off by {output:.1%}"
        elif wrong := [one for one, error in gradients.items() if not error <= bounds[1]]:
            kinds = _of_last_layer(wrong)
            what = f"output right, gradient of {', '.join(kinds)} off by {gradient:.1%}"
            if self.low and "v_proj" not in kinds:
                what += ", as where a sink goes through a log-sum-exp without its gradient"
        errors: dict[str, Any] = {"output": output, "gradient": gradient}
        return Case(name=way, right=not what, what=what or lacking, **errors)

    def _exact(self, at: _Setting) -> Answer:
        if at not in self.answers:
            with self._set(self.exact, at):
                self.answers[at] = answer_of(self.exact, self.texts, "plain")
        return self.answers[at]

    def _cause(self, answer: Answer, bound: float, at: _Setting) -> str:
        """The part left out, where the logits are those of a model without it."""
        without = {"the sink is ignored": at._replace(sink=DROPPED)} if self.low else {}
        if at.window is not None:
            without["the window is ignored"] = at._replace(window=None)
        if self.low and at.window is not None:
            without["the sink and the window are ignored"] = _Setting(sink=DROPPED)
        exact = ((part, self._exact(other)) for part, other in without.items())
        return next((part for part, one in exact if answer.errors(one)[0] <= bound), "")

    def _place(self, answer: Answer, exact: Answer, way: str) -> str:
        """Where an output is wrong, when another part of it is right."""
        right_T = [
            (one - other).norm(dim=-1) <= ROUNDING[self.dtype] * other.norm(dim=-1)
            for one, other in zip(answer.logits, exact.logits, strict=True)
        ]
        if way == "packed" and right_T[0].all():
            return "texts see those packed before them"
        if way == "padded" and right_T[1].all():
            return "tokens before a text are not hidden"
        if way in ("cached", "chunks") and all(bool(one[:4].all()) for one in right_T):
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


def _timed(model: Any) -> float | None:
    """Seconds of a forward and backward pass of one text; None where it has none."""
    (ids,) = drawn_texts(model, (TIMED,))

    def step() -> None:
        logits_of(model, ids[None]).float().sum().backward()
        model.zero_grad(set_to_none=True)

    try:
        step()  # compiles kernels
        timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
        return timer.timeit(3).median
    except Exception:  # the cases have said why
        return None


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
    config = model.config
    owners = {id(one): one for one in (config, config.get_text_config(), *model.modules())}
    names = ("sliding_window", "window")
    attributes = ((one, key, vars(one).get(key)) for one in owners.values() for key in names)
    return [(one, key, now) for one, key, now in attributes if type(now) is int]


def _of_last_layer(parameters: list[str]) -> list[str]:
    """Names within the last layer of those, from where an error of the gradient went down."""

    def layer(name: str) -> int:
        return max((int(part) for part in name.split(".") if part.isdigit()), default=-1)

    last = max(map(layer, parameters))
    own = (name for name in parameters if layer(name) == last)
    return sorted({name.removesuffix(".weight").rpartition(".")[2] for name in own})


def _reason(error: BaseException) -> str:
    return (first_line(error) or type(error).__name__)[:200]
