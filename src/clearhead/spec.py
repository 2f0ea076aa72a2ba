"""Description of one layer: the axes, a value on each, and the table of valid combinations.

A mechanism declares itself once (`Declaration`, in its own file under `clearhead.nn`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Annotated, Any

from clearhead.errors import ClearheadError, choose
from clearhead.ranges import Count, Length, Range, Share

# The smallest and the largest number that float32 holds in full, in which models are made.
_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
_AboveZero = Annotated[
    float, Range("a finite number above 0", lambda x: _SMALLEST <= x <= _LARGEST)
]
_Deviation = Annotated[float, Range("a finite number, at least 0", lambda x: 0 <= x <= _LARGEST)]
Gain = Annotated[float, Range("a finite number", lambda x: abs(x) <= _LARGEST)]
# From ΔW = 0 beside a β of 0 neither ever has a gradient.
_ValueGain = Annotated[
    float, Range("a finite number other than 0", lambda x: _SMALLEST <= abs(x) <= _LARGEST)
]
_Lambda = Annotated[
    float, Range("a number between 0 and 1 (the paper has 0.2 to 0.8)", lambda x: 0 < x < 1)
]


def _axis(default: str, summary: str) -> Any:
    return field(default=default, metadata={"axis": summary})


@dataclass(kw_only=True)
class LayerSettings:
    """Settings that a layer and its model's configuration share, with one name and default."""

    norm_eps: _AboveZero = 1e-5
    bias: bool = False
    initializer_range: _AboveZero = 0.02
    max_position_embeddings: Count = 2048
    # Of 1 transformers' caches would keep everything.
    sliding_window: Length | None = None
    prefix_length: Count = 1
    lambda_init: _Lambda | None = None
    head_norm: str = "affine"
    query_range: _Deviation | None = None
    value_init: str | None = None
    value_gain: _ValueGain = 1.0
    attention_gain: Gain | None = None
    mlp_skip_gain: Gain | None = None
    dropout: Share = 0.0
    annealed_start: bool = False
    scores: str = _axis("dot", "how a query is compared with a key")
    qk_norm: str = _axis("none", "what is done to queries and keys before position")
    normalizer: str = _axis("softmax", "how a row of scores becomes weights")
    maps: str = _axis("single", "how attention maps are combined into one")
    shaping: str = _axis("none", "how the attention matrix meets the identity")
    epilogue: str = _axis("none", "what becomes of the heads before the output projection")
    values: str = _axis("linear", "what attention averages")
    projections: str = _axis("linear", "how the heads are written into the stream")
    position: str = _axis("rope", "how order enters")
    direction: str = _axis("causal", "which keys a query may see")
    norm: str = _axis("rmsnorm", "what is normalised, and by which gain")
    mlp: str = _axis("swiglu", "the position-wise network")
    mlp_rotation: str = _axis("none", "the basis in which the MLP's output matrix reads")
    order: str = _axis("sequential", "if the MLP reads what attention wrote, or what it read")
    attention_skip: str = _axis("identity", "what of the stream passes by attention")
    mlp_skip: str = _axis("identity", "what of the stream passes by the MLP")


@dataclass(kw_only=True)
class LayerSpec(LayerSettings):
    """One layer, fully described. Widths count the baseline: heads × head_dim of plain attention.

    `maps="differential"` pairs those heads, each pair with a value of width 2 × head_dim;
    "differential-v2" has twice as many queries as the baseline, and its keys and values. There are
    as many value heads as key heads, or one for each query head whose value is its own input.
    """

    index: int
    depth: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_value_heads: int
    head_dim: int
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10_000.0}
    )
    mlp_gain: Gain | None = None

    @property
    def width(self) -> int:
        """Channels of all heads together."""
        return self.num_attention_heads * self.head_dim


# Each axis, with a line on it: a field of LayerSpec that names a mechanism.
AXES: Mapping[str, str] = {
    each.name: each.metadata["axis"] for each in fields(LayerSpec) if "axis" in each.metadata
}


@dataclass(frozen=True)
class Declaration:
    """All that clearhead knows of one mechanism; arguments after `build` are given by name.

    Attributes:
        axis: a key of `AXES`.
        name: the value that selects it, such as "differential".
        summary: one line for tables and help.
        source: the paper and equation it comes from.
        build: makes the mechanism's module: for norms from width and eps, for mlp_rotation from a
            width, for all others from a `LayerSpec` and, by axis, also the number of maps and
            `keys_together`, how many neighbours share a key head (normalizer); the number of heads
            (position); the position's `prepare` (scores); the width of a head (qk_norm); the
            rotation of what the output matrix reads (mlp). For order it gives the block's class.
        refuses: reason why a layer cannot have it, and which axis to change; None if it can.
        flops: multiply-adds × 2 that it adds to the forward pass, for each token of a sequence of
            the given length (`flops(layer, length)`), beyond those of its linear projections.
        cache: numbers cached for each token in generation.
        heads, query_heads: for maps: number of output heads, and of queries per token, one for each
            map.
        query_width, key_width: for scores: widths of a head's query and key, as projected.
        rotary_width: for scores: twice the number of angles in a head's rotary table.
        adopt: converts a layer's weights to this mechanism from the axis's default, to the same
            function if possible: `adopt(weights, before, after)`, of weights by their names within
            the layer's attention ("mlp." before an MLP's) and the two specs. None: weights stay,
            and the new mechanism starts as its paper says.
        anneals: whether its effect can grow from none over a training run (`annealed_start`).
    """

    axis: str
    name: str
    summary: str
    source: str
    build: Callable[..., Any]
    _: KW_ONLY
    refuses: Callable[[LayerSpec], str | None] | None = None
    flops: Callable[[LayerSpec, int], float] = lambda layer, length: 0.0
    cache: Callable[[LayerSpec], int] = lambda layer: 0
    heads: Callable[[LayerSpec], int] = lambda layer: layer.num_attention_heads
    query_heads: Callable[[LayerSpec], int] = lambda layer: layer.num_attention_heads
    query_width: Callable[[LayerSpec], int] = lambda layer: layer.head_dim
    key_width: Callable[[LayerSpec], int] = lambda layer: layer.head_dim
    rotary_width: Callable[[LayerSpec], int] = lambda layer: layer.head_dim
    adopt: Callable[[dict[str, Any], LayerSpec, LayerSpec], dict[str, Any]] | None = None
    anneals: bool = False


class Registry:
    """The declarations, by axis and name."""

    def __init__(self) -> None:
        self._table: dict[str, dict[str, Declaration]] = {axis: {} for axis in AXES}
        self._packages: dict[tuple[str, str], str] = {}  # of those that are not of this house

    def add(self, declaration: Declaration, package: str = "clearhead") -> None:
        """Add a mechanism, in place of any that the same package gave this name; a name of another
        package is refused."""
        axis, name = choose("axis", declaration.axis, self._table), declaration.name
        owner = self._packages.get((axis, name), "clearhead")
        if name in self._table[axis] and (owner != package or package == "clearhead"):
            raise ClearheadError(f"{axis}={name!r} is {owner}'s already: choose another name")
        self._table[axis][name] = declaration
        if package != "clearhead":
            self._packages[axis, name] = package

    def packages(self, layers: Iterable[LayerSpec] | None = None) -> set[str]:
        """Packages other than clearhead with mechanisms in these layers; None: in the registry."""
        if layers is None:
            return set(self._packages.values())
        used = {(axis, getattr(layer, axis)) for layer in layers for axis in AXES}
        return {package for key, package in self._packages.items() if key in used}

    def names(self, axis: str) -> list[str]:
        """The values that the axis takes, in the order of declaration."""
        return list(self._table[axis])

    def find(self, axis: str, name: str) -> Declaration:
        """Look one up; an unknown name is a ClearheadError naming the near misses."""
        known = self._table[axis]
        return known[name if name in known else choose(f"value of {axis}", name, known)]

    def of(self, layer: LayerSpec) -> dict[str, Declaration]:
        """The declaration chosen on each axis of a layer."""
        names = {axis: getattr(layer, axis) for axis in AXES}
        return {axis: self._table[axis].get(x) or self.find(axis, x) for axis, x in names.items()}

    def anneals(self, layer: LayerSpec) -> bool:
        """True where `annealed_start` has an effect on a layer."""
        return any(declaration.anneals for declaration in self.of(layer).values())

    def table(self) -> str:
        """Every mechanism in Markdown, as docs/mechanisms.md has it."""
        lines = ["| axis | value | what it is | source |", "| --- | --- | --- | --- |"]
        for axis, declarations in self._table.items():
            for name, declaration in declarations.items():
                cells = (f"`{axis}`", f"`{name}`", declaration.summary, declaration.source)
                lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
        return "\n".join(lines)

    def check(self, layer: LayerSpec) -> None:
        """Raise a ClearheadError if the layer cannot be built, saying what to change."""
        heads, keys = layer.num_attention_heads, layer.num_key_value_heads
        if heads % keys:
            raise ClearheadError(
                f"num_key_value_heads={keys} does not divide num_attention_heads={heads}: choose a "
                "divisor"
            )
        if layer.num_value_heads not in (keys, heads):
            raise ClearheadError(
                f"num_value_heads={layer.num_value_heads} is neither one for each of the {keys} "
                f"key heads nor one for each of the {heads} heads: leave it out"
            )
        for axis, declaration in self.of(layer).items():
            if declaration.refuses and (reason := declaration.refuses(layer)):
                raise ClearheadError(f"{axis}={declaration.name!r} cannot be used here: {reason}")
