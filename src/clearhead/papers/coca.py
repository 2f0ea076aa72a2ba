"""Extrapolation in length: arXiv 2309.08646. `tiny` and `small` learn retrieval from synthetic
documents; `paper` is the published 350M recipe on the most similar public text."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from clearhead.lab.sweep_configs import PlanConfig
from clearhead.papers.contrasts import Claim, Contrast, Gate, higher, lower, no_worse, number, ratio
from clearhead.papers.recipes import RUNS
from clearhead.papers.study import BOOKS, Study, diagnose, evaluate, experiment
from clearhead.settings.data import DataConfig

PAPER = "arXiv 2309.08646"
# Best of 7.5e-4 to 6e-3 by the last tenth of training, one seed, ALiBi's within 0.01 of the best
# (docs/log.md). Forget gates have the rate of their rival.
TUNED = dict.fromkeys(("transformer", "alibi", "forget", "pope"), (3e-3,))
RATES = {"tiny": (1.5e-3,), "small": (1.5e-3, 3e-3, 6e-3), "paper": (1e-4,)}
EVERY = (0.0, 0.25, 0.5, 0.75, 1.0)  # depths
ENDS = EVERY[::2]
LONG: dict[str, Any] = {"lengths": (512, 1024, 2048, 4096, 8192), "batch_tokens": 131_072}
HELD_OUT: dict[str, Any] = {"data": DataConfig(data=(f"{BOOKS}#test",)), "split": "all"}


@experiment(PAPER, published=True)
def long_context(scale: str) -> Iterator[Study]:
    """Positions and maps, read up to 16 times (`paper`: 64 times) as long as they were trained."""
    for preset in (  # the interventions: how attention tells order, and how many maps it has
        *("transformer", "alibi", "forget", "coca", "coca-strict", "coca-slack", "pope"),
        "differential",
    ):
        # ALiBi and forget gates have no frequencies to scale; PoPE needs no scaling.
        scaled = preset not in ("alibi", "forget", "pope")
        rates = TUNED.get(preset, RATES[scale]) if scale == "tiny" else RATES[scale]
        table = replace(TABLES[scale], questions=_questions(scale, scaled))
        yield table.arm(preset, *rates)


@experiment(PAPER)
def memory(scale: str) -> Iterator[Study]:
    """Bytes that the forms of CoCA take beside RoPE, in two shapes at several lengths; nothing is
    trained, and nothing is random."""
    shapes, lengths = {  # layers, width and heads
        "tiny": (((2, 64, 2), (4, 128, 4)), (4096, 8192, 16_384)),
        "small": (((12, 512, 8), (24, 1024, 16)), (8192, 16_384, 32_768)),
    }[scale]
    for layers, width, heads in shapes:
        table = Study(label=f"{layers} layers, {width} wide", seeds=(0,))
        shape = {"layers": layers, "width": width, "heads": heads}
        table = table.changed(**shape, questions={"memory": PlanConfig(lengths=lengths)})
        yield from table.each(("transformer", "coca", "coca-strict", "coca-slack"))  # interventions


@experiment(PAPER)
def passkeys_alone(scale: str) -> Iterator[Study]:
    """Positions, trained on passkeys in windows twice as long as the longest document, so that
    every distance up to it is seen whole."""
    rates = {"tiny": (1.5e-3, 3e-3), "small": (7.5e-4, 1.5e-3, 3e-3)}[scale]
    for preset in ("transformer", "coca", "coca-slack", "alibi", "pope"):  # the intervention
        if not (preset == "coca-slack" and scale == "small"):
            yield ALONE[scale].arm(preset, *rates)


def _questions(scale: str, scaled: bool) -> dict[str, Any]:
    """Perplexity and retrieval, under scalings of the rotary frequencies or under none."""
    kinds, factors = (("none", "dynamic"), (2.0, 4.0, 8.0)) if scaled else (("none",), ())
    ask = partial(evaluate, rope_scaling=kinds, factors=factors)
    passkeys = {"wording": "landmark", "trials": 10, "depths": ENDS}
    # fmt: off
    questions = {
        "tiny": {"scaled": ask(
            tasks=("perplexity", "passkey"), tokens=24_576, perplexity={"document_tokens": 4096},
            passkey=passkeys, lengths=(128, 256, 512, 1024, 2048), batch_tokens=131_072)},
        "small": {
            "scaled": ask(
                tasks=("perplexity",), tokens=24_576, perplexity={"document_tokens": 4096},
                passkey=passkeys, **LONG, **HELD_OUT),
            "passkeys": ask(
                tasks=("passkey",), passkey={"wording": "landmark", "trials": 100},
                factors=factors[1:2], **LONG),
            "retrieval": evaluate(
                tasks=("hits", "recall", "needles", "allocation"),
                needles={"grid": ("1x1", "4x2"), "depths": ENDS}, **LONG, **HELD_OUT)},
        # PG-19 by strides of 512, and 100 passkeys a length, 20 at each of five depths.
        "paper": {"text": ask(
            tasks=("perplexity", "passkey"), tokens=3_276_800, perplexity={"stride": 512},
            lengths=(512, 1024, 2048, 4096, 8192, 16_384, 32_768), **HELD_OUT)},
    }[scale]
    # fmt: on
    # Scores by distance, of keys near a query.
    order = diagnose(windows=16, length=TABLES[scale].train.sequence_length)
    return questions | ({"order": order} if scaled else {})


# Documents of the first are whole within a window of 128 tokens of 1,024 words. Within windows of
# 512 the key's distance varies, and so does the document's length.
PASSKEY = "synthetic:passkey:landmark=1,documents=20000@0.5"
VARIED = "synthetic:passkey:landmark=1,characters=2000,documents=100000@0.3"
OTHERS = (
    "synthetic:needle:needles=1,queries=1,characters=340,documents=20000@0.1",
    "synthetic:needle:needles=2,queries=2,characters=340,documents=20000@0.1",
    "synthetic:recall:pairs=4,queries=4,documents=20000@0.1",
    "synthetic:recall:filler=1,characters=360,documents=20000@0.1",
)
# Attention is learnt sooner from matrices that keep the size of what they read: 192 ** -0.5.
_STUDY = Study().changed(initializer_range=0.07, document_masks=True, vocabulary=1024)
# fmt: off
TABLES = {
    "tiny": _STUDY.changed(
        label="long context", length=128, tokens=1_500_000, batch_size=8,
        data=("python-stdlib", PASSKEY)),
    "small": _STUDY.changed(
        label="long context", layers=6, width=384, heads=6, initializer_range=384**-0.5, length=512,
        tokens=41_000_000, batch_size=32, sweep_tokens=8_000_000,
        data=(BOOKS, VARIED, *OTHERS), limit=100_000_000),
    "paper": RUNS["coca-350m"].changed(label="long context"),
}
ALONE = {
    "tiny": _STUDY.changed(
        label="passkeys alone", length=256, tokens=3_000_000, sweep_tokens=500_000,
        data=("python-stdlib@0.1", "synthetic:passkey:landmark=1,documents=60000@0.9"),
        questions={"passkeys": evaluate(
            tasks=("passkey",), passkey={"wording": "landmark", "depths": EVERY},
            lengths=(96, 192, 384, 768, 1536))}),
    "small": _STUDY.changed(
        label="passkeys of 512", layers=6, width=256, heads=8, length=1024,
        tokens=20_000_000, sweep_tokens=4_000_000, batch_size=16,
        data=("python-stdlib@0.1",
              "synthetic:passkey:landmark=1,characters=2600,documents=60000@0.9"),
        questions={"passkeys": evaluate(
            tasks=("passkey",), passkey={"wording": "landmark", "depths": EVERY, "trials": 10},
            lengths=LONG["lengths"], batch_tokens=65_536)}),
}
# fmt: on


# The claims

EXACT, SLACK, BASE = "coca", "coca-slack", "transformer"
_NTK: dict[str, Any] = {"scaling": "dynamic"}
PERPLEXITY = partial(number, "perplexity", task="perplexity")
_PASSKEYS = partial(number, "accuracy", task="passkey")
WITHIN = {"times": 1}  # the training length
# Of passkeys alone: a length at which all keys are found, and others beyond all documents.
FAR = (("passkeys alone", 96, (384, 1536)), ("passkeys of 512", 512, (2048, 8192)))


def passkeys(words: str, arm: str, far: Any, near: Any = WITHIN, **at: Any) -> Contrast:
    """Passkeys at a length `far` beyond that of training, of models that find them at `near`."""
    short, named = _PASSKEYS(**near, **at), "within the training length"
    gates = (Gate(short.of(one), 0.95, f"accuracy of {one} {named}") for one in (arm, BASE))
    return higher(words, _PASSKEYS(**far, **at), arm, BASE, *gates)


def passkeys_beyond(arm: str, name: str, records: Any = FAR) -> Iterator[Contrast]:
    """Passkeys alone beyond the longest document, of models that find all in short texts."""
    for label, near, lengths in records:
        for far in lengths:
            words, at = f"{label} in {far:,} tokens, {name}", {"scaling": "none", "label": label}
            yield passkeys(words, arm, {"length": far}, {"length": near}, **at)


def _factors(form: str, arm: str) -> Contrast:
    """Distance between the perplexities at two factors of NTK."""
    at_2, at_8 = (PERPLEXITY(times=16, **_NTK, factor=one) for one in (2.0, 8.0))
    ours, theirs = (at_2.of(one, minus=at_8.of(one), distance=True) for one in (arm, BASE))
    words = f"difference in perplexity at 16 × between factors 2 and 8, {form}"
    return lower(words, at_2, ours, theirs)


# fmt: off
CLAIMS = (
    Claim("coca/exact",
        "Exactly collinear attention trains, at a small cost within the training length.",
        "", "long-context", (no_worse("perplexity at the training length, to within 4",
            PERPLEXITY(times=1, scaling="none"), EXACT, BASE, by=4),)),
    Claim("coca/table1",
        "CoCA's perplexity stays low far beyond the training length, with and without NTK.",
        "at 16 × 55.8 against 138, both with NTK", "long-context",
        tuple(lower(f"perplexity at {times} ×, {words}", PERPLEXITY(times=times, **at), arm, BASE)
            for words, arm, times, at in (
                ("the authors' form, NTK 4", SLACK, 16, {**_NTK, "factor": 4.0}),
                ("exact, NTK 8", EXACT, 8, {**_NTK, "factor": 8.0}),
                ("exact, unscaled", EXACT, 8, {"scaling": "none"}))), also=("coca/figure7",)),
    Claim("coca/table2", "CoCA finds passkeys far beyond the training length.",
        "0.50 against 0.41 at 16 ×, both with NTK", "long-context",
        (passkeys("passkeys at 16 ×, the authors' form, NTK 4", SLACK, {"times": 16}, **_NTK,
            factor=4.0),
        passkeys("passkeys at 4 ×, exact, unscaled", EXACT, {"times": 4}, scaling="none")),
        also=("coca/figure5", "coca/figure8")),
    Claim("coca/passkeys",
        "Ours: where only distance is new, CoCA finds passkeys further than RoPE.",
        "", "passkeys-alone",
        (*passkeys_beyond(EXACT, "exact"), *passkeys_beyond(SLACK, "the authors' form", FAR[:1]))),
    Claim("coca/table3", "The factor of NTK scaling matters less to CoCA than to RoPE.",
        "0.49, 0.50 and 0.48 with factors 2, 4 and 8", "long-context",
        (_factors("exact", EXACT), _factors("the authors' form", SLACK)),
        also=("coca/figure9", "coca/figure10")),
    Claim("coca/order",
        "With CoCA's initial angle of zero, near tokens score lower than far ones less often.",
        "", "long-context", (lower("share of rotary pairs whose score grows with distance at first",
            number("anomalous_before"), EXACT, BASE),
        lower("share of keys that score lower at distances 0 to 3 than at 4 to 15, content held",
            number("order_broken_content"), EXACT, BASE)), by_construction=True),
    Claim("coca/memory", "CoCA's scores need no tensor of length × length × width; its cached keys "
        "have half the width.",
        "length² × width for scores as written, length² once they are contracted in another order "
        "(table 6)", "memory",
        (ratio("bytes of a training step's tensors at 16,384 tokens, as a share of those at 8,192 "
            "(at most 2)", number("step_bytes", task="memory", length=16384), EXACT,
            number("step_bytes", task="memory", length=8192).of(EXACT), at_most=2, counted=True),
        ratio("bytes of cached keys, as a share of RoPE's (at most 0.5)",
            number("cached_key_bytes", task="memory", length=16384), EXACT, BASE, at_most=0.5,
            counted=True)), also=("coca/table6",), by_construction=True),
    Claim("coca/bidirectional", "CoCA works in encoders.", "", "encoders",
        (no_worse("loss at hidden tokens, both with rotary positions", number("masked loss",
            times=1), "bert · position rope · scores co*", "bert · position rope", by=0.05),)),
)
# fmt: on
