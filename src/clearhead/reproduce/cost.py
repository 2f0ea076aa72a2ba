"""Cost of an experiment, before it is run."""

from collections.abc import Iterable
from dataclasses import dataclass

from clearhead.experiments.configs import CompareConfig
from clearhead.named_models import PRESETS, SIZES
from clearhead.reproduce.study import BEYOND, Study

# FLOP a second in training: measured in results/passkey.jsonl on two cores (1.97 M parameters and
# 1.5 M tokens take 300 s of one), and a tenth of an H200's dense bfloat16 peak.
SPEEDS = {"tiny": 1.2e11, "small": 1e14, "paper": 1e14}
PLACES = {"tiny": "two cores", "small": "one GPU", "paper": "one GPU"}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Trainings of an experiment; evaluations come on top.

    Attributes:
        flops: 6 × parameters × tokens; attention comes on top, at these lengths a few per cent.
        beyond: runs that sweeps add at most, where a best rate is the lowest or the highest.
    """

    runs: int
    tokens: int
    flops: float
    beyond: int

    def in_words(self, scale: str) -> str:
        """30 runs, 45 M tokens, about 1.2 h of training on two cores, sweeps may add up to 9 runs;
        or "no training"."""
        if not self.runs:
            return "no training"
        hours = self.flops / SPEEDS[scale] / 3600
        time = f"{hours:.1f} h" if hours >= 1 else f"{max(1, round(60 * hours))} min"
        if hours > 100:
            time = f"{hours / 24:,.0f} days"
        digits = ".3g" if self.tokens < 1e9 else ",.0f"
        tokens = f"{self.tokens / 1e6:{digits}} M"
        if self.tokens >= 1e10:
            tokens = f"{self.tokens / 1e9:,.0f} G"
        more = f", sweeps may add up to {self.beyond} runs" if self.beyond else ""
        known = f"{self.runs} runs, {tokens} tokens, about {time} of training on {PLACES[scale]}"
        return known + more


def cost(arms: Iterable[Study]) -> Cost:
    """Count the runs, sweeps of rates included."""
    runs = tokens = beyond = 0
    flops, sizes = 0.0, dict[str, int]()
    for one in arms:
        sweep = len(one.tries) * one.is_swept
        trained = len(one.seeds) * bool(one.tries)
        read = trained * one.train.tokens + sweep * one.sweep_tokens
        runs += trained + sweep
        beyond += BEYOND * one.is_swept
        tokens += read
        flops += 6.0 * sizes.setdefault(one.label, one.parameters or parameters(one)) * read
    return Cost(runs=runs, tokens=tokens, flops=flops, beyond=beyond)


def parameters(config: CompareConfig) -> int:
    """The baseline's matrices at an arm's shape; the arms of a table have as many, or fewer.

    By arithmetic: a list of all experiments would make hundreds of models.
    """
    size = SIZES[config.size]
    shape = {**size, **PRESETS[config.presets[0]], **config.set}
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    attention = 4 * width * heads * shape.get("head_dim", width // heads)
    mlp = 8 * width**2  # of either form
    if "intermediate_size" in config.set or not {"hidden_size", "mlp"} & config.set.keys():
        matrices = 3 if shape.get("mlp", "swiglu") in ("swiglu", "geglu") else 2
        mlp = matrices * width * shape.get("intermediate_size", mlp // width // matrices)
    rows = shape["vocab_size"] * (1 if shape.get("tie_word_embeddings", True) else 2)
    rows += shape["max_position_embeddings"] if shape.get("position") == "learned" else 0
    return rows * width + shape["num_hidden_layers"] * (attention + mlp)
