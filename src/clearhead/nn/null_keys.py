"""Null keys (arXiv 2410.17174, 2410.10781, 2402.17762): softmax-1, sink, key bias, key-value."""

from functools import partial

import torch
from torch import Tensor, nn

from clearhead.nn.bases import Softmax, Weights, with_own_parameters
from clearhead.ops.precision import without_autocast
from clearhead.ops.requests import repeat
from clearhead.spec import Declaration, LayerSpec

# Beside a row's log-sum-exp of −20 or more, less than float32 resolves.
NOTHING = -40.0
# Part of the advice given where `Sink.rests`.
AT_REST = f"the sinks rest at {NOTHING:g}, where training hardly moves them"


class Softmax1(nn.Module, Softmax):
    """A fixed sink of logit 0: exp(s) / (1 + Σ exp(s)). The base of learned sinks and key biases.

    `annealed_start` adds −40 (1 − t)² to its logit, t the part of the training run that is done: a
    buffer, which never falls.
    """

    offset: Tensor | None

    def __init__(self, layer: LayerSpec, heads: int, together: int) -> None:
        nn.Module.__init__(self)
        Softmax.__init__(self, layer, heads, together)
        self.register_buffer("offset", torch.full((1,), NOTHING) if layer.annealed_start else None)

    def reset_parameters(self) -> None:
        if self.offset is not None:
            nn.init.constant_(self.offset, NOTHING)
        for parameter in self.parameters(recurse=False):
            nn.init.zeros_(parameter)

    def on_step_end(self, done: float) -> None:
        if self.offset is not None:
            self.offset.clamp_(min=NOTHING * (1 - done) ** 2)

    @with_own_parameters
    def resting(self) -> float | Tensor:
        return 0.0 if self.offset is None else self.offset.expand(self.heads)


class Sink(Softmax1):
    """exp(s) / (exp(b) + Σ exp(s)) with a learned b for each map, from 0 (softmax-1)."""

    def __init__(self, layer: LayerSpec, heads: int, together: int) -> None:
        super().__init__(layer, heads, together)
        self.logit = nn.Parameter(torch.zeros(heads))

    @property
    def rests(self) -> bool:
        """True if every logit is so low that hardly any gradient reaches it."""
        return bool((self.logit <= NOTHING).all())

    @with_own_parameters
    def resting(self) -> Tensor:
        return self.logit if self.offset is None else self.logit + self.offset


class KeyBias(Softmax1):
    """exp(s) / (exp(q · k′ / √d) + Σ exp(s)), k′ learned for each key head (arXiv 2410.10781).

    k′ has no position: its score is with the query as projected. It starts at 0 (softmax-1).
    """

    def __init__(self, layer: LayerSpec, heads: int, together: int) -> None:
        super().__init__(layer, heads, together)
        self.scale = layer.head_dim**-0.5
        self.key = nn.Parameter(torch.zeros(layer.num_key_value_heads, layer.head_dim))

    @with_own_parameters
    def sink(self, q_BHTD: Tensor) -> Tensor:
        exact = torch.promote_types(q_BHTD.dtype, torch.float32)
        key_BHD1 = repeat(self.key[None, :, :, None], self.heads, self.together)
        with without_autocast(q_BHTD):
            logit_BHT = (q_BHTD.to(exact) @ key_BHD1.to(exact)).squeeze(-1) * self.scale
        return logit_BHT if self.offset is None else logit_BHT + self.offset


class KeyValue(nn.Module, Softmax):
    """Softmax over the text's keys and N learned keys k′ with learned values v′.

    They take the positions 0 to N − 1, and the text begins at N. Every query sees them: no window,
    padding or document hides them. Started from 0, they are softmax-1 with a logit of log N.
    """

    def __init__(self, layer: LayerSpec, heads: int, together: int) -> None:
        nn.Module.__init__(self)
        Softmax.__init__(self, layer, heads, together)
        self.prefix_length = number = layer.prefix_length
        self.key_bias = nn.Parameter(torch.zeros(layer.num_key_value_heads, number, layer.head_dim))
        self.value_bias = nn.Parameter(torch.zeros(layer.num_value_heads, number, layer.head_dim))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.key_bias)
        nn.init.zeros_(self.value_bias)

    @with_own_parameters
    def prefix(self) -> tuple[Tensor, Tensor]:
        return self.key_bias, self.value_bias


def _adopt_sink(weights: Weights, before: LayerSpec, after: LayerSpec) -> Weights:
    """Logits too low to have an effect, or of the fixed sink, or 0 for an annealed start."""
    logit = 0.0 if after.annealed_start or before.normalizer == "softmax1" else NOTHING
    like = weights["q_proj.weight"]
    return {**weights, "normalizer.logit": like.new_full((after.num_attention_heads,), logit)}


def _key_refuses(layer: LayerSpec) -> str | None:
    if layer.scores != "dot":
        found = f"scores={layer.scores!r}"
        return f"its keys are of the dot product, not of {found}: choose scores='dot', or a sink"
    return None


def _key_value_refuses(layer: LayerSpec) -> str | None:
    if layer.shaping != "none":
        return "attention's centre leaves its values out: choose shaping='none', or a sink"
    return _key_refuses(layer)


_normalizer = partial(Declaration, "normalizer")
DECLARATIONS = (
    _normalizer(
        "softmax1",
        "exp(s) / (1 + Σ exp(s)): a row may sum to less than 1",
        "arXiv 2410.17174, section 3.2",
        Softmax1,
        anneals=True,
    ),
    _normalizer(
        "sink",
        "exp(s) / (exp(b) + Σ exp(s)), b learned for each head, from 0 (softmax-1)",
        "arXiv 2410.17174, section 3.2, with gpt-oss's learned logit",
        Sink,
        anneals=True,
        adopt=_adopt_sink,
    ),
    _normalizer(
        "key",
        "exp(s) / (exp(q · k′ / √d) + Σ exp(s)), k′ a learned key of value zero, from 0",
        "arXiv 2410.10781 (K biases)",
        KeyBias,
        anneals=True,
        refuses=_key_refuses,
        flops=lambda layer, length: 2.0 * layer.width,
    ),
    _normalizer(
        "key-value",
        "softmax over learned keys k′ with learned values v′ before the text's own, from 0",
        "arXiv 2402.17762, eq. 3; filled with a token's, arXiv 2410.05265 (PrefixQuant)",
        KeyValue,
        refuses=_key_value_refuses,
        flops=lambda layer, length: 4.0 * layer.width * layer.prefix_length,
    ),
)
