"""Extrapolation in length: arXiv 2309.08646, tables 1 to 3 and section 3.

`tiny` and `small` learn retrieval from synthetic documents. `paper` is the published 350M recipe
(two epochs of 50 B tokens) on the most similar public text, since theirs was not published.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from clearhead.data import DataConfig
from clearhead.lab.sweep_configs import PlanConfig
from clearhead.papers.contrasts import (
    Claim,
    Contrast,
    higher,
    lower,
    no_worse,
    number,
    ratio,
    reaches,
)
from clearhead.papers.readings import Reading
from clearhead.papers.recipes import RUNS
from clearhead.papers.study import BOOKS, Study, diagnose, evaluate, experiment

PAPER = "arXiv 2309.08646"
HELD_OUT: dict[str, Any] = {"data": DataConfig(data=(f"{BOOKS}#test",)), "split": "all"}
# Documents that are whole within a window of 128 tokens of 1,024 words.
PASSKEY = "synthetic:passkey:landmark=1,documents=20000"
OTHERS = (
    "synthetic:needle:needles=1,queries=1,characters=340,documents=20000@0.1",
    "synthetic:needle:needles=2,queries=2,characters=340,documents=20000@0.1",
    "synthetic:recall:pairs=4,queries=4,documents=20000@0.1",
    "synthetic:recall:filler=1,characters=360,documents=20000@0.1",
)
# Best of 7.5e-4 to 6e-3 by the last tenth of training, one seed, ALiBi's within 0.01 of the best
# (docs/log.md). Forget gates have the rate of their rival.
TUNED = {"transformer": (3e-3,), "alibi": (3e-3,), "forget": (3e-3,), "pope": (3e-3,)}
RATES = {"tiny": (1.5e-3,), "small": (1.5e-3, 3e-3, 6e-3), "paper": (1e-4,)}
# Within windows of 512 the key's distance varies, and so does the document's length.
VARIED = "synthetic:passkey:landmark=1,characters=2000,documents=100000"
DEPTHS = (0.0, 0.5, 1.0)
EVERY = (0.0, 0.25, 0.5, 0.75, 1.0)
LONG: dict[str, Any] = {"lengths": (512, 1024, 2048, 4096, 8192), "batch_tokens": 131_072}
READ: dict[str, Any] = {"lengths": (128, 256, 512, 1024, 2048), "batch_tokens": 131_072}
ORDER = partial(diagnose, windows=16)  # scores by distance, of keys near a query
SCALED: dict[str, Any] = {"rope_scaling": ("none", "dynamic"), "factors": (2.0, 4.0, 8.0)}

# Of the memory of tensors: layers, width and heads; lengths.
DEEP = {"tiny": ((2, 64, 2), (4, 128, 4)), "small": ((12, 512, 8), (24, 1024, 16))}
TEXTS = {"tiny": (4096, 8192, 16_384), "small": (8192, 16_384, 32_768)}


@experiment(
    PAPER,
    "Which attention, trained short, still reads and retrieves in long texts?",
    published=True,
)
def long_context(scale: str) -> Iterator[Study]:
    """Positions and maps, read up to 16 times (`paper`: 64 times) as long as they were trained."""
    table = TABLES[scale]
    for preset in (
        "transformer",
        "alibi",  # the interventions: how attention tells order, and how many maps it has
        "forget",
        "coca",
        "coca-strict",
        "coca-slack",
        "pope",
        "differential",
    ):
        rates = TUNED.get(preset, RATES[scale]) if scale == "tiny" else RATES[scale]
        if preset in ("alibi", "forget", "pope"):  # have nothing to scale, or need no scaling
            yield _unscaled(table).arm(preset, *rates)
        else:
            yield table.arm(preset, *rates)


@experiment(
    PAPER,
    "Does collinear attention need tensors that grow with the square of the text, and what does it "
    "cache?",
)
def memory(scale: str) -> Iterator[Study]:
    """Bytes that the forms of CoCA take beside RoPE, in two shapes at several lengths.

    Nothing is trained and nothing is random, so there are no seeds.
    """
    for layers, width, heads in DEEP[scale]:
        table = Study(label=f"{layers} layers, {width} wide", seeds=(0,)).changed(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            questions={"memory": PlanConfig(lengths=TEXTS[scale])},
        )
        for preset in ("transformer", "coca", "coca-strict", "coca-slack"):  # the intervention
            yield table.arm(preset)


def _scaled(**options: Any) -> Any:
    """Perplexity and passkeys under scalings of the rotary frequencies."""
    return evaluate(
        **{"tasks": ("perplexity", "passkey"), **SCALED, **options},
        tokens=24_576,
        perplexity={"document_tokens": 4096},
        passkey={"wording": "landmark", "trials": 10, "depths": DEPTHS},
    )


def _unscaled(table: Study) -> Study:
    questions: dict[str, Any] = {**table.questions}
    del questions["order"]
    return replace(
        table,
        questions={
            name: replace(question, rope_scaling=("none",), factors=())
            for name, question in questions.items()
        },
    )


@experiment(PAPER, "Who finds passkeys beyond all training documents, where nothing else is asked?")
def passkeys_alone(scale: str) -> Iterator[Study]:
    """Positions, trained on passkeys in windows twice as long as the longest document, so that
    every distance up to it is seen whole."""
    table = ALONE[scale]
    for preset in ("transformer", "coca", "coca-slack", "alibi", "pope"):  # the intervention
        if not (preset == "coca-slack" and scale == "small"):
            yield table.arm(preset, *ALONE_RATES[scale])


# fmt: off
_ALONE = Study().changed(
    initializer_range=0.07, document_masks=True, log_every=20, vocabulary=1024)
ALONE = {
    "tiny": _ALONE.changed(
        label="passkeys alone", max_position_embeddings=256,
        tokens=3_000_000, sweep_tokens=500_000, sequence_length=256,
        data=("python-stdlib@0.1", "synthetic:passkey:landmark=1,documents=60000@0.9"),
        questions={"passkeys": evaluate(
            tasks=("passkey",), passkey={"wording": "landmark", "depths": EVERY},
            lengths=(96, 192, 384, 768, 1536))}),
    "small": _ALONE.changed(
        label="passkeys of 512", num_hidden_layers=6, hidden_size=256, num_attention_heads=8,
        max_position_embeddings=1024,
        tokens=20_000_000, sweep_tokens=4_000_000, sequence_length=1024, batch_size=16,
        data=("python-stdlib@0.1",
              "synthetic:passkey:landmark=1,characters=2600,documents=60000@0.9"),
        questions={"passkeys": evaluate(
            tasks=("passkey",), passkey={"wording": "landmark", "depths": EVERY, "trials": 10},
            lengths=LONG["lengths"], batch_tokens=65_536)}),
}
ALONE_RATES = {"tiny": (1.5e-3, 3e-3), "small": (7.5e-4, 1.5e-3, 3e-3)}
_TINY = Study(label="long context").changed(
    # Attention is learnt sooner from matrices that keep the size of what they read: 192 ** -0.5.
    max_position_embeddings=128, initializer_range=0.07,
    tokens=1_500_000, sequence_length=128, batch_size=8, document_masks=True, log_every=20,
    data=("python-stdlib", f"{PASSKEY}@0.5"), vocabulary=1024,
    questions={"scaled": _scaled(**READ), "order": ORDER(length=128)})
TABLES = {
    "tiny": _TINY,
    "small": _TINY.changed(
        num_hidden_layers=6, hidden_size=384, num_attention_heads=6, max_position_embeddings=512,
        initializer_range=384**-0.5,
        tokens=41_000_000, sequence_length=512, batch_size=32, sweep_tokens=8_000_000,
        data=(BOOKS, f"{VARIED}@0.3", *OTHERS), limit=100_000_000,
        questions={
            "scaled": _scaled(tasks=("perplexity",), **LONG, **HELD_OUT),
            "passkeys": evaluate(
                tasks=("passkey",), passkey={"wording": "landmark", "trials": 100},
                rope_scaling=SCALED["rope_scaling"], factors=(4.0,), **LONG),
            "retrieval": evaluate(
                tasks=("hits", "recall", "needles", "allocation"),
                needles={"grid": ("1x1", "4x2"), "depths": DEPTHS}, **LONG, **HELD_OUT),
            "order": ORDER(length=512)}),
    "paper": RUNS["coca-350m"].study(presets=("transformer",), label="long context", questions={
        # PG-19 by strides of 512, and 100 passkeys a length, 20 at each of five depths.
        "text": evaluate(
            tasks=("perplexity", "passkey"), tokens=3_276_800,
            lengths=(512, 1024, 2048, 4096, 8192, 16_384, 32_768),
            perplexity={"stride": 512}, **SCALED, **HELD_OUT),
        "order": ORDER(length=512)}),
}
# fmt: on


# The claims

EXACT, SLACK, BASE = "coca", "coca-slack", "transformer"
_NTK: dict[str, Any] = {"scaling": "dynamic"}
_MASKED = number("masked loss", times=1)


# Of passkeys alone: a length at which all keys are found, and others beyond all documents.
FAR = ((ALONE["tiny"].label, 96, (384, 1536)), (ALONE["small"].label, 512, (2048, 8192)))


def passkeys(words: str, arm: str, times: int, **at: Any) -> Contrast:
    """Passkeys beyond the training length, of models that find them within it."""
    far, near = (number("accuracy", times=one, task="passkey", **at) for one in (times, 1))
    return _found(words, arm, far, near)


def passkeys_beyond(arm: str, name: str, records: Sequence[Any] = FAR) -> Iterator[Contrast]:
    """Passkeys alone beyond the longest document, of models that find all in short texts."""
    for label, near, lengths in records:
        read = partial(number, "accuracy", task="passkey", scaling="none", label=label)
        for one in lengths:
            words = f"{label} in {one:,} tokens, {name}"
            yield _found(words, arm, read(length=one), read(length=near))


def _found(words: str, arm: str, far: Reading, near: Reading) -> Contrast:
    gates = (
        reaches(near, one, 0.95, f"accuracy of {one} within the training length")
        for one in (arm, BASE)
    )
    return higher(words, far, arm, BASE, *gates)


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
    Claim("coca/passkeys",
        "Ours: where only distance is new, CoCA finds passkeys further than RoPE.",
        "", "passkeys-alone",
        (*passkeys_beyond(EXACT, "exact"),
        *passkeys_beyond(SLACK, "the authors' form", FAR[:1]))),
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
