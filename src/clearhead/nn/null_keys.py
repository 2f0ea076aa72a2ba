"""Null keys, by which a head may attend to nothing: softmax-1, sinks, key biases, learned keys."""

from functools import partial

import torch
from torch import Tensor, nn

from clearhead.nn.bases import Softmax, Weights, with_own_parameters
from clearhead.ops.precision import without_autocast
from clearhead.ops.requests import repeat
from clearhead.spec import Declaration, LayerSpec

# Beside a row's log-sum-exp of −20 or more, less than float32 resolves.
NOTHING = -40.0
# Said beside a remedy, where `Sink.rests`.
AT_REST = f"the sinks rest at {NOTHING:g}, where training hardly moves them"


class Softmax1(nn.Module, Softmax):
    """A fixed sink of logit 0: exp(s) / (1 + Σ exp(s)). The base of learned sinks and key biases.

    `annealed_start` adds −40 (1 − t)² to its logit, t the part of the training run that is done:
    half of the run is spent above −10, where a null key begins to count. The offset is a buffer
    that `on_step_end` sets. It never falls, so a trained model can be trained further.
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
        """Set the offset after a step, at a share `done` of the run from 0 to 1."""
        if self.offset is not None:
            self.offset.clamp_(min=NOTHING * (1 - done) ** 2)

    @with_own_parameters
    def resting(self) -> float | Tensor:
        return 0.0 if self.offset is None else self.offset.expand(self.heads)


class Sink(Softmax1):
    """exp(s) / (exp(b) + Σ exp(s)) with a learned b for each map.

    b starts at 0, so that the layer starts as softmax-1 exactly.
    """

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

    k′ has no position: its score is with the query as projected. It starts at 0, so the layer
    starts as softmax-1 exactly.
    """

    def __init__(self, layer: LayerSpec, heads: int, together: int) -> None:
        super().__init__(layer, heads, together)
        self.scale = layer.head_dim**-0.5
        self.key = nn.Parameter(torch.zeros(layer.num_key_value_heads, layer.head_dim))

    @with_own_parameters
    def sink(self, q_BHTD: Tensor) -> Tensor:
        exact = torch.promote_types(q_BHTD.dtype, torch.float32)
        key_BHD1 = repeat(self.key[None, :, :, None], self.heads, self.together)
        # Autocast would round the logits to bfloat16.
        with without_autocast(q_BHTD):
            logit_BHT = (q_BHTD.to(exact) @ key_BHD1.to(exact)).squeeze(-1) * self.scale
        return logit_BHT if self.offset is None else logit_BHT + self.offset


class KeyValue(nn.Module, Softmax):
    """Softmax over the text's keys and N learned keys k′ with learned values v′.

    They take the positions 0 to N − 1, and the text begins at N: filled with the keys and values of
    tokens, they act as these tokens before the text. Every query sees them: no window, padding or
    document hides them. From 0 they start as softmax-1 with a logit of log N.
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
    """Logits too low to have an effect, or the logit of the fixed sink that they replace.

    An annealed start needs no low logits: it has no effect at first.
    """
    logit = 0.0 if after.annealed_start or before.normalizer == "softmax1" else NOTHING
    like = weights["q_proj.weight"]
    return {**weights, "normalizer.logit": like.new_full((after.num_attention_heads,), logit)}


def _key_refuses(layer: LayerSpec) -> str | None:
    if layer.scores != "dot":
        return (
            f"its key is scored by the dot product, unlike keys under scores={layer.scores!r}: "
            "choose scores='dot', or normalizer='sink'"
        )
    return None


def _key_value_refuses(layer: LayerSpec) -> str | None:
    if layer.scores != "dot":
        return (
            f"scores={layer.scores!r} pass no gradient to keys of 0, as its own start: choose "
            "scores='dot', or normalizer='sink'"
        )
    if layer.shaping != "none":
        return (
            f"shaping={layer.shaping!r} subtracts attention's centre, which leaves its values out: "
            "choose shaping='none', or normalizer='sink'"
        )
    return None


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
