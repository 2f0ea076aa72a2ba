"""Claims on collinear constrained attention: arXiv 2309.08646."""

from typing import Any

from clearhead.reproduce.contrasts import (
    Claim,
    Contrast,
    higher,
    lower,
    no_worse,
    number,
    ratio,
    reaches,
)

EXACT, SLACK, BASE = "coca", "coca-slack", "transformer"
_NTK: dict[str, Any] = {"scaling": "dynamic"}
_MASKED = number("masked loss", times=1)


def passkeys(words: str, arm: str, times: int, **at: Any) -> Contrast:
    """Passkeys beyond the training length, of models that find them within it."""
    what = number("accuracy", times=times, task="passkey", **at)
    within = number("accuracy", times=1, task="passkey", **at)
    gates = (
        reaches(within, one, 0.95, f"accuracy of {one} within the training length")
        for one in (arm, BASE)
    )
    return higher(words, what, arm, BASE, *gates)


def _perplexity(words: str, arm: str, times: int, **at: Any) -> Contrast:
    return lower(words, number("perplexity", times=times, task="perplexity", **at), arm, BASE)


def _factors(form: str, arm: str) -> Contrast:
    """Distance between the perplexities at two factors of NTK."""
    at_2, at_8 = (
        number("perplexity", times=16, task="perplexity", **_NTK, factor=one) for one in (2.0, 8.0)
    )
    ours, theirs = (at_2.of(one, minus=at_8.of(one), distance=True) for one in (arm, BASE))
    words = f"difference in perplexity at 16 × between factors 2 and 8, {form}"
    return lower(words, at_2, ours, theirs)


# fmt: off
CLAIMS = (
    Claim("coca/exact",
        "Exactly collinear attention trains, at a small cost within the training length.",
        "", "long-context",
        (no_worse("perplexity at the training length, to within 4", number("perplexity", times=1,
            task="perplexity", scaling="none"), EXACT, BASE, by=4),)),
    Claim("coca/table1",
        "CoCA's perplexity stays low far beyond the training length, with and without NTK.",
        "at 16 × 55.8 against 138, both with NTK", "long-context",
        (_perplexity("perplexity at 16 ×, the authors' form, NTK 4", SLACK, 16, **_NTK, factor=4.0),
        _perplexity("perplexity at 8 ×, exact, NTK 8", EXACT, 8, **_NTK, factor=8.0),
        _perplexity("perplexity at 8 ×, exact, unscaled", EXACT, 8, scaling="none")),
            also=("coca/figure7",)),
    Claim("coca/table2", "CoCA finds passkeys far beyond the training length.",
        "0.50 against 0.41 at 16 ×, both with NTK", "long-context",
        (passkeys("passkeys at 16 ×, the authors' form, NTK 4", SLACK, 16, **_NTK, factor=4.0),
        passkeys("passkeys at 4 ×, exact, unscaled", EXACT, 4, scaling="none")),
            also=("coca/figure5", "coca/figure8")),
    Claim("coca/table3", "The factor of NTK scaling matters less to CoCA than to RoPE.",
        "0.49, 0.50 and 0.48 with factors 2, 4 and 8", "long-context",
        (_factors("exact", EXACT),
        _factors("the authors' form", SLACK)), also=("coca/figure9", "coca/figure10")),
    Claim("coca/order",
        "With CoCA's initial angle of zero, near tokens score lower than far ones less often.",
        "", "long-context",
        (lower("share of rotary pairs whose score grows with distance at first",
            number("anomalous_before"), EXACT, BASE),
        lower("share of keys that score lower at distances 0 to 3 than at 4 to 15, content held",
            number("order_broken_content"), EXACT, BASE)), by_construction=True),
    Claim("coca/memory",
        "CoCA's scores need no tensor of length × length × width; its cached keys have half the "
        "width.",
        "length² × width for scores as written, length² once they are contracted in another order "
            "(table 6)", "memory",
        (ratio("bytes of a training step's tensors at 16,384 tokens, as a share of those at 8,192 "
            "(at most 2)", number("step_bytes", task="memory", length=16384), EXACT,
            number("step_bytes", task="memory", length=8192).of(EXACT), at_most=2, counted=True),
        ratio("bytes of cached keys, as a share of RoPE's (at most 0.5)", number("cached_key_bytes",
            task="memory", length=16384), EXACT, BASE, at_most=0.5, counted=True)),
            also=("coca/table6",), by_construction=True),
    Claim("coca/bidirectional", "CoCA works in encoders.",
        "", "encoders",
        (no_worse("loss at hidden tokens, both with rotary positions", _MASKED,
            "bert · position rope · scores co*", "bert · position rope", by=0.05),)),
)
# fmt: on
