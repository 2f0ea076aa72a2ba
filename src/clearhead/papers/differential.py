"""Differential attention: arXiv 2410.05258, tables 1 to 7, figures 3 and 6 to 8, and V2.

The authors advise 8 differential heads or more. `tiny` has 8, each of two maps 12 wide; `small` has
8 of two maps 64 wide. `paper` is the 1.4B model of table 6, of `abilities` the 3B one: their text
was not published.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from clearhead.data import BANKING
from clearhead.papers.contrasts import LOSS, Claim, higher, lower, no_worse, number, ratio, reaches
from clearhead.papers.recipes import RUNS
from clearhead.papers.study import COSMOPEDIA, Study, diagnose, evaluate, experiment, quantize

PAPER = "arXiv 2410.05258"

# fmt: off
SHAPES: Mapping[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 16},
    "small": {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 16,
        "head_dim": 64, "intermediate_size": 1728},
}
# fmt: on
TOKENS = {"tiny": 1_000_000, "small": 50_000_000}
SWEEPS = {"tiny": 200_000, "small": 8_000_000}
LENGTHS = {"tiny": 128, "small": 512, "paper": 2048}
RATES = {"tiny": (1.5e-3, 3e-3), "small": (1e-3, 2e-3), "paper": (1.5e-4,)}
# Needles that fit the window whole; at `tiny` half of the text, or none would be learnt.
NEEDLES = "synthetic:needle:needles={needles},queries=2,characters={characters},documents=20000"
# Table 1's tasks of lm-eval, the labelled texts of figures 6 and 7, the documents of table 4.
HARNESS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
# Left out at `tiny`: OpenBookQA states no licence, and some of PIQA's answers exceed the window.
LEFT_OUT = ("openbookqa", "piqa")
DOCUMENTS = ("hf:EdinburghNLP/xsum#test",)
WIDTHS = {"tiny": (64, 128, 192), "small": (256, 512, 1024)}
ROUNDS, STEPS = 6, 24  # of short runs that are timed
TIMED: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8},
    "small": {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16},
}


@experiment(
    PAPER, "Does a difference of two maps find more and have smaller outliers?", published=True
)
def differential(scale: str) -> Iterator[Study]:
    """V1 and V2 against one map, on text with needles in it."""
    table = _table(scale, "differential", _retrieval(scale))
    yield table.arm("transformer", *RATES[scale])
    yield table.arm("differential", *RATES[scale])  # the interventions: two maps, subtracted
    yield table.arm("differential-v2", *RATES[scale])


@experiment(PAPER, "Which parts of differential attention matter?", published=True)
def differential_ablations(scale: str) -> Iterator[Study]:
    """V1 without its parts, and with other numbers of heads."""
    table, heads = _table(scale, "differential ablations", {}), 16
    yield table.arm("transformer", *RATES[scale])
    yield table.arm("transformer", *RATES[scale], num_attention_heads=heads // 2)
    yield table.arm("differential", *RATES[scale])
    # The interventions: the norm of each head, λ's start, the number of heads.
    yield table.arm("differential", *RATES[scale], head_norm="none")
    for start in (0.5, 0.8):
        yield table.arm("differential", *RATES[scale], lambda_init=start)
    yield table.arm("differential", *RATES[scale], num_attention_heads=heads // 2)


@experiment(
    PAPER, "Does differential attention answer, classify and summarise better?", published=True
)
def abilities(scale: str) -> Iterator[Study]:
    """V1 against one map: lm-eval's tasks, many-shot classification, summaries.

    Models of `tiny` and `small` guess. Questions and documents come from the hub. `tiny` reads
    the first questions of five of the seven tasks.
    """
    length = 4096 if scale == "paper" else LENGTHS[scale]
    table = _table(scale, "abilities", _abilities(scale, length), published="diff-3b")
    rates = (3.2e-4,) if scale == "paper" else RATES[scale]
    yield table.arm("transformer", *rates)
    yield table.arm("differential", *rates)  # the intervention


@experiment(PAPER, "Does its lead hold as models grow?")
def differential_scaling(scale: str) -> Iterator[Study]:
    """V1 and one map at three widths, with tokens in proportion to the parameters."""
    largest = WIDTHS[scale][-1]
    for width in WIDTHS[scale]:
        tokens = TOKENS[scale] * width**2 // largest**2
        table = _table(scale, f"width {width}", {}).changed(tokens=tokens, hidden_size=width)
        settings = {key: x for key, x in table.set.items() if key != "intermediate_size"}
        table = table.changed(set=settings)  # its MLP in proportion to the width
        for preset in ("transformer", "differential"):  # the intervention
            yield table.arm(preset, *RATES[scale])


@experiment(
    f"{PAPER}, arXiv 2311.01906", "How fast do differential maps and simplified blocks train here?"
)
def speed(scale: str) -> Iterator[Study]:
    """Throughput on the device that the record names; the claims compare ratios.

    Every seed is a round: one short run of each arm in turn, so that other load on the machine
    affects all arms alike.
    """
    rows, length = {"tiny": (4, 256), "small": (16, 2048)}[scale]
    # fmt: off
    table = Study(label="speed", size=scale, seeds=tuple(range(ROUNDS))).changed(
        **TIMED[scale], max_position_embeddings=length,
        lengths=(),  # models of so few steps say nothing about quality
        tokens=STEPS * rows * length, sequence_length=length, batch_size=rows,
        compile="none" if scale == "tiny" else "blocks", log_every=4)
    # fmt: on
    yield table.arm("transformer", 1e-3)
    for preset in ("differential", "differential-v2", "sas", "sas-p", "clearhead"):
        yield table.arm(preset, 1e-3)  # the intervention


def _retrieval(scale: str) -> Mapping[str, Any]:
    length, depths = LENGTHS[scale], {"depths": (0.0, 0.5, 1.0)}
    schemes = tuple(f"logits{bits}-tensor" for bits in (8, 6, 4))
    return {
        "retrieval": evaluate(
            tasks=("perplexity", "needles", "allocation"),
            lengths=(length, 2 * length),
            tokens=16_384,
            needles={"grid": ("1x1", "2x2", "6x2"), **depths},
            allocation=depths,
        ),
        "bits": quantize(scheme=schemes, length=length, tokens=16_384),
        # Table 5 has the largest logits too, which training does not measure.
        "logits": diagnose(length=length),
    }


def _abilities(scale: str, length: int) -> Mapping[str, Any]:
    # Questions of each task, and texts to classify.
    questions, queries = {"tiny": (200, {"queries": 30})}.get(scale, (None, {}))
    tasks = tuple(one for one in HARNESS if scale != "tiny" or one not in LEFT_OUT)
    return {
        "answers": evaluate(
            tasks=(*tasks, "shots"),
            # No demonstration fits the window of `tiny` beside a text and the longest label.
            lengths=(2 * length if scale == "tiny" else length,),
            lm_eval={"limit": questions},
            shots={"data": f"{BANKING}#train", "test": f"{BANKING}#test", **queries},
        ),
        "documents": evaluate(
            tasks=("hallucination",),
            lengths=(length,),
            hallucination={"files": DOCUMENTS, "summary_tokens": length // 4},
        ),
    }


def _table(
    scale: str, label: str, questions: Mapping[str, Any], published: str = "diff-1.4b"
) -> Study:
    if scale == "paper":
        return RUNS[published].study(presets=("transformer",), label=label, questions=questions)
    length, tiny = LENGTHS[scale], scale == "tiny"
    needles = NEEDLES.format(needles=2 if tiny else 6, characters=length * 5 // 2)
    # fmt: off
    return Study(label=label, size=scale, questions=questions).changed(
        **SHAPES[scale], max_position_embeddings=length, lengths=(1, 2, 4),
        tokens=TOKENS[scale], sweep_tokens=SWEEPS[scale],
        sequence_length=length, batch_size=8 if tiny else 32, document_masks=True,
        compile="none" if tiny else "blocks", log_every=20,
        data=("python-stdlib", f"{needles}@0.5") if tiny else (COSMOPEDIA, f"{needles}@0.3"),
        vocabulary=1024 if tiny else 16_384)
    # fmt: on


# The claims

V1, V2, BASE = "differential", "differential-v2", "transformer"
_SHOTS: dict[str, Any] = {"task": "shots", "order": "random"}
_LOGITS = number("added_perplexity", scheme="logits4-tensor")
_READ: dict[str, Any] = {"task": "perplexity", "scaling": "none"}
_NAMES = number("names_above_chance", task="hallucination")
_SPEED = number("tokens_per_second", label="speed")

_OUTLIERS = reaches(number("kurtosis"), BASE, 4, "kurtosis of the baseline")
_DEAR = reaches(_LOGITS, BASE, 0.5, "what 4 bits add to the baseline's perplexity")

# fmt: off
CLAIMS = (
    Claim("diff/table1",
        "Differential attention answers more of lm-eval's tasks after the same tokens.",
        "3B, 1T tokens: 60.6 against 56.8 % on average; 350B tokens of the same text (table 8): "
            "56.2 against 55.4 %", "abilities",
        (higher("mean accuracy on lm-eval's tasks (five at `tiny`)", number("acc"), V1, BASE,
            reaches(number("acc"), BASE, 0.43, "the number compared with")),),
            also=("diff/table8",)),
    Claim("diff/figure3",
        "Differential attention reaches a Transformer's loss with fewer parameters or tokens.",
        "62 to 65 % of the parameters, or of the tokens", "differential-scaling",
        (lower("loss at this width", number("loss", times=1, label="width *"), V1, BASE),)),
    Claim("diff/figure4",
        "Differential attention's perplexity is lower, within the training length and far beyond "
        "it.",
        "loss lower at every position to 64K, within the training length", "long-context",
        tuple(lower(f"perplexity at {where} training length", number("perplexity", times=times,
            **_READ), V1, BASE) for times, where in ((1, "the"), (16, "16 × the")))),
    Claim("diff/table2", "Differential attention finds several needles among others more often.",
        "0.85 against 0.55, two of six needles at 4K", "differential",
        tuple(higher(words, number("accuracy", task="needles", needles=n, queries=q), V1, BASE)
            for words, n, q in (("two of six needles found", 6, 2), ("a single needle found", 1,
            1))), also=("diff/figure5",)),
    Claim("diff/table3",
        "Differential attention puts more weight on the answer and less on the rest.",
        "0.27 to 0.40 on the answer, against 0.03 to 0.09", "differential",
        (higher("attention on the answer", number("answer_share", task="allocation"), V1, BASE),
        lower("attention on other text before the question", number("noise_share",
            task="allocation"), V1, BASE))),
    Claim("diff/figure6", "Differential attention classifies better from many demonstrations.",
        "+5.2 to +21.6 points", "abilities",
        (higher("share of texts classified rightly", number("accuracy", **_SHOTS), V1, BASE,
            reaches(number("accuracy", **_SHOTS), BASE, 0.15, "the number compared with")),)),
    Claim("diff/figure7",
        "The order of demonstrations changes the answers of differential attention less.",
        "margins of 4 to 19 points against 10 to 56", "abilities",
        (lower("accuracy of the best order less the worst", number("margin", **_SHOTS), V1, BASE,
            *(reaches(number("accuracy", **_SHOTS), arm, 0.15, f"accuracy of {arm}") for arm in (V1,
            BASE))),)),
    Claim("diff/table4", "Differential attention hallucinates less in summaries and answers.",
        "+0.07 to +0.19 in the share free of hallucinations", "abilities",
        (lower("share of names in summaries that the document does not have",
            number("unsupported_names", task="hallucination"), V1, BASE, *(reaches(_NAMES, arm, 0.1,
            f"names above chance of {arm}") for arm in (V1, BASE))),)),
    Claim("diff/table5", "Hidden states of differential attention have smaller outliers.",
        "largest hidden state 3,608 to 1,688; largest logit 318 to 38.8", "differential",
        (lower("largest hidden state", number("largest_activation"), V1, BASE, _OUTLIERS),
        lower("kurtosis of the hidden states", number("kurtosis"), V1, BASE, _OUTLIERS),
        lower("largest attention logit", number("logit_top_1"), V1, BASE, _OUTLIERS))),
    Claim("diff/figure8",
        "The attention logits of differential attention can be quantised to fewer bits.",
        "4 bits as good as a Transformer's 6, by accuracy on HellaSwag", "differential",
        (lower("perplexity added by logits of 4 bits", _LOGITS, V1, BASE, _DEAR),
        no_worse("perplexity added by logits of 4 bits, against logits of 6 in the baseline",
            _LOGITS, V1, number("added_perplexity", scheme="logits6-tensor").of(BASE),
            _DEAR, by=0.3))),
    Claim("diff/table6",
        "Without the norm of each head V1's loss is higher; λ's start matters little; half the "
        "baseline's heads is right.",
        "1.4B: loss 3.062; without the norm of each head 3.122; baseline 3.087",
            "differential-ablations",
        (higher("loss without the norm of each head", LOSS, "differential · head_norm none", V1),
        no_worse("loss with λ's start 0.5 in all layers", LOSS, "differential · lambda_init 0.5",
            V1, by=0.01),
        no_worse("loss with a quarter of the baseline's number of heads", LOSS,
            "differential · num_attention_heads 8", V1, by=0.01, better="higher"),
        no_worse("loss with λ's start 0.8 in all layers, against the baseline's", LOSS,
            "differential · lambda_init 0.8", BASE, by=0.02))),
    Claim("diff/v2",
        "Differential attention's second version learns better than the baseline, and no worse "
        "than the first.",
        "loss lower by 0.02 to 0.03 after 1T tokens", "differential",
        (lower("loss of V2 against the baseline's", LOSS, V2, BASE),
        no_worse("loss of V2 against V1's", LOSS, V2, V1, by=0.01))),
    Claim("diff/speed", "Differential attention slows training down little.",
        "9 to 12 % fewer tokens a second", "speed",
        tuple(ratio(f"tokens a second of {name} against the baseline's, on the record's device",
            _SPEED, arm, BASE, at_least=0.88) for name, arm in (("V1", V1), ("V2", V2))),
            also=("diff/table7",)),
)
# fmt: on
