"""Cost of an experiment, before it is run."""

from collections.abc import Iterable

from clearhead.experiments.configs import CompareConfig
from clearhead.named_models import PRESETS, SIZES
from clearhead.reproduce.study import BEYOND, Study

NOTHING = "no training"
# FLOP a second in training: measured in results/passkey.jsonl on two cores (1.97 M parameters and
# 1.5 M tokens take 300 s of one), and a tenth of an H200's dense bfloat16 peak.
SPEEDS = {"tiny": (1.2e11, "two cores"), "small": (1e14, "one GPU"), "paper": (1e14, "one GPU")}


def cost(arms: Iterable[Study], scale: str) -> str:
    """30 runs, 45 M tokens, about 1.2 h of training on two cores, sweeps may add up to 9 runs; or
    "no training". Evaluations come on top.

    The time is that of 6 × parameters × tokens; attention adds a few per cent at these lengths.
    """
    runs = tokens = beyond = 0
    flops = 0.0
    sizes: dict[str, int] = {}  # by label
    for one in arms:
        sweep = len(one.tries) * one.is_swept
        trained = len(one.seeds) * bool(one.tries)
        read = trained * one.train.tokens + sweep * one.sweep_tokens
        runs, tokens, beyond = runs + trained + sweep, tokens + read, beyond + BEYOND * one.is_swept
        flops += 6.0 * sizes.setdefault(one.label, parameters(one)) * read
    if not runs:
        return NOTHING
    speed, place = SPEEDS[scale]
    hours = flops / speed / 3600
    time = f"{hours:.1f} h" if hours >= 1 else f"{max(1, round(60 * hours))} min"
    time = f"{hours / 24:,.0f} days" if hours > 100 else time
    count = f"{tokens / 1e6:.3g} M" if tokens < 1e9 else f"{tokens / 1e6:,.0f} M"
    count = f"{tokens / 1e9:,.0f} G" if tokens >= 1e10 else count
    more = f", sweeps may add up to {beyond} runs" if beyond else ""
    return f"{runs} runs, {count} tokens, about {time} of training on {place}{more}"


def parameters(config: CompareConfig) -> int:
    """The baseline's matrices at an arm's shape; the arms of a table have as many, or fewer.

    By arithmetic: a list of all experiments would make hundreds of models.
    """
    if isinstance(config, Study) and config.parameters:
        return config.parameters
    shape = {**SIZES[config.size], **PRESETS[config.presets[0]], **config.set}
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    attention = 4 * width * heads * shape.get("head_dim", width // heads)
    mlp = 8 * width**2  # of either form
    if "intermediate_size" in config.set or not {"hidden_size", "mlp"} & config.set.keys():
        matrices = 3 if shape.get("mlp", "swiglu") in ("swiglu", "geglu") else 2
        mlp = matrices * width * shape.get("intermediate_size", mlp // width // matrices)
    rows = shape["vocab_size"] * (1 if shape.get("tie_word_embeddings", True) else 2)
    rows += shape["max_position_embeddings"] if shape.get("position") == "learned" else 0
    return rows * width + shape["num_hidden_layers"] * (attention + mlp)
