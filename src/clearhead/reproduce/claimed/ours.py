"""Claims of ours: repairs together, positions, and repairs of a trained model."""

from collections.abc import Callable
from dataclasses import replace

from clearhead.reproduce.claimed.coca import passkeys
from clearhead.reproduce.contrasts import Claim, Contrast, blocked, higher, lower, no_worse, number

# Repair → patterns of the arms with it and without it.
REPAIRS = {
    "differential maps (V2)": ("*maps differential-v2*", "*maps single*"),
    "softmax-1": ("*normalizer softmax1*", "*normalizer softmax ·*"),
    "SAS-P's blocks": ("sas-p · *", "transformer · *"),
    "ALiBi": ("*position alibi*", "*position rope*"),
    "a gate": ("*epilogue gate*", "*epilogue none*"),
    "OrthoAdam": ("* orthoadam", "* adamw"),
}
# All are better lower.
MEASURES = {
    "loss": number("loss", times=1),
    "loss at 4 × the length": number("loss", times=4),
    "loss of recalled tokens at 4 × the length": number("ar_hit_loss", times=4),
    "kurtosis": number("kurtosis"),
    "queries with a first-token sink": number("first_token_argmax_share"),
    **{
        f"cost of {one}": number("added_perplexity", scheme=one)
        for one in ("w8a8-coarse", "w4-channel")
    },
}
_CODE = number("perplexity", task="perplexity")
_SINK = number("first_token_argmax_share")
PREFIX, TRAINED, TURNED = "prefix rotated", "prefix rotated trained", "prefix turned"
ALIBI = REPAIRS["ALiBi"]
_WITHIN, _BEYOND = (
    number("perplexity", times=times, task="perplexity", scaling="none") for times in (1, 16)
)
_TOGETHER = number("loss", times=1, label="together")


def _added(
    verb: Callable[..., Contrast], words: str, arm: str, than: str, scheme: str = "w8a8-coarse"
) -> Contrast:
    """Perplexity that a scheme adds."""
    what = number("added_perplexity", scheme=scheme)
    return verb(f"perplexity added by {scheme}, {words}", what, arm, than)


# fmt: off
CLAIMS = (
    Claim("together/loss",
        "Each repair costs no loss, on average over the others present or absent.",
        "", "together",
        tuple(blocked(no_worse(f"loss with {name}", _TOGETHER, *arms, by=0.01)) for name, arms in
            REPAIRS.items())),
    Claim("together/preset",
        "The composition that wins, SAS-P's blocks and a gate, is on no measure worse than the "
        "baseline.",
        "", "composition",
        tuple(no_worse(words, replace(one, label="composition"), "clearhead", "transformer")
            for words, one in MEASURES.items())),
    Claim("together/extrapolation",
        "Beside the other repairs, too, ALiBi extrapolates further than RoPE.",
        "", "together",
        (blocked(lower("loss at 4 × the training length, ALiBi", replace(_TOGETHER, times=4),
            *ALIBI)),
        blocked(lower("loss of tokens that stood in the text before, at 4 × the training length, "
            "ALiBi", number("ar_hit_loss", times=4, label="together", task="hits"), *ALIBI)))),
    Claim("position/alibi",
        "ALiBi reads far beyond the training length, where RoPE does not, at a small cost within.",
        "arXiv 2108.12409", "long-context",
        (no_worse("perplexity at the training length, to within 4", _WITHIN, "alibi", "transformer",
            by=4),
        lower("perplexity at 16 × the training length", _BEYOND, "alibi", "transformer"))),
    Claim("position/pope",
        "Polar coordinates (PoPE) read further beyond the training length than RoPE and CoCA, none "
        "scaled, at no cost within.",
        "arXiv 2509.10534", "long-context",
        (no_worse("perplexity at the training length, to within 0.5", _WITHIN, "pope",
            "transformer", by=0.5),
        lower("perplexity at 16 × the training length", _BEYOND, "pope", "transformer"),
        lower("perplexity at 16 × the training length, against exact CoCA", _BEYOND, "pope",
            "coca"),
        passkeys("passkeys at 16 ×", "pope", 16, scaling="none"))),
    Claim("position/forget",
        "A learned decay (FoX) reads better than ALiBi's fixed one, at the training length and 16 "
        "times it.",
        "", "long-context",
        (lower("perplexity at 16 × the training length", _BEYOND, "forget", "alibi"),
        lower("perplexity at the training length", _WITHIN, "forget", "alibi"))),
    Claim("retrofit/quantisation",
        "Trained repairs of SmolLM2-135M lose less at 8 bits than a prefix and a rotation "
        "untrained.",
        "", "retrofit",
        tuple(_added(lower, words, arm, than) for words, arm,
            than in (("prefix and rotation, trained against untrained", TRAINED, PREFIX),
            ("all turned, trained against untrained", f"{TURNED} trained", TURNED),
            ("all turned with equal rows, trained against untrained", *(f"{TURNED} equal trained",
            f"{TURNED} equal")),
            ("learned keys and values, trained, against prefix and rotation untrained",
            *("key-value trained", PREFIX)),
            ("softmax-1 annealed against prefix and rotation untrained", *("softmax1 annealed",
            PREFIX))))),
    Claim("retrofit/controls",
        "Training without a repair (all weights, attention, an adapter) does not make 8 bits as "
        "cheap.",
        "", "retrofit",
        tuple(_added(higher, f"{name} against prefix and rotation trained", arm, TRAINED) for name,
            arm in (("dense continuation", "dense"), ("attention-only training", "attention only"),
            ("an adapter (LoRA)", "lora")))),
    Claim("retrofit/loss",
        "Repairs cost no perplexity against dense continuation on the same tokens.",
        "", "retrofit",
        tuple(no_worse(f"perplexity of code, {words}", _CODE, arm, "dense", by=0.3) for words,
            arm in (("prefix and rotation", TRAINED), ("prefix and all turned",
            f"{TURNED} trained"), ("differential-v2", "differential-v2"), ("gated", "gated"),
            ("prefix, all turned and learned scales", "searched turned learned trained")))),
    Claim("retrofit/attention",
        "Differential maps put on a trained model gain more than training its attention alone.",
        "F1 0.2910 with DEX, 0.2933 with the attention's own matrices alone (Qwen3-4B, arXiv "
            "2505.16333)", "retrofit",
        (lower("perplexity of code, differential-v2 against attention-only training", _CODE,
            "differential-v2", "attention only"),)),
    Claim("retrofit/sink",
        "Null keys do not take a trained model's sink; a prefix or learned keys and values do.",
        "", "retrofit",
        (higher("queries that look most at the first token, softmax-1", _SINK, "softmax1 annealed",
            TRAINED),
        lower("queries that look most at the first token, learned keys and values against dense "
            "continuation", _SINK, "key-value trained", "dense"))),
    Claim("retrofit/basis",
        "Turning residual stream and values too makes 8 and 6 bits cheaper than a prefix and one "
        "rotation.",
        "", "retrofit",
        tuple(_added(lower, "all turned against the down projections alone", TURNED, PREFIX, scheme)
            for scheme in ("w8a8-coarse", "w8a6-token"))),
)
# fmt: on
