"""Differential attention: arXiv 2410.05258, and V2. The 8 heads' maps are 12 wide at `tiny`, 64 at
`small`; `paper` is the 1.4B model of table 6, in `abilities` the 3B one, on other text."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from clearhead.papers.contrasts import LOSS, Claim, Gate, higher, lower, no_worse, number, ratio
from clearhead.papers.recipes import RUNS
from clearhead.papers.study import COSMOPEDIA, Study, diagnose, evaluate, experiment, quantize
from clearhead.settings.data import BANKING

PAPER = "arXiv 2410.05258"
# Needles that fit the window whole; at `tiny` half of the text, or none would be learnt.
NEEDLES = "synthetic:needle:needles={},queries=2,characters={},documents=20000@{}"
_STUDY = Study(lengths=(1, 2, 4)).changed(heads=16, document_masks=True)
# fmt: off
BY_WIDTH = {
    "tiny": _STUDY.changed(
        layers=3, width=192, length=128, tokens=1_000_000, sweep_tokens=200_000, batch_size=8,
        data=("python-stdlib", NEEDLES.format(2, 320, 0.5)), vocabulary=1024),
    "small": _STUDY.changed(
        size="small", layers=6, width=768, head_dim=64, length=512,
        tokens=50_000_000, sweep_tokens=8_000_000, batch_size=32, compile="blocks",
        data=(COSMOPEDIA, NEEDLES.format(6, 1280, 0.3)), vocabulary=16_384),
}
# fmt: on
WIDTHS = {"tiny": (64, 128, 192), "small": (256, 512, 1024)}
TABLES = {
    "tiny": BY_WIDTH["tiny"],
    "small": BY_WIDTH["small"].changed(intermediate_size=1728),
    "paper": RUNS["diff-1.4b"],
}
RATES = {"tiny": (1.5e-3, 3e-3), "small": (1e-3, 2e-3), "paper": (1.5e-4,)}
# Table 1's tasks of lm-eval. Left out at `tiny`: OpenBookQA states no licence, and some of PIQA's
# answers exceed the window.
HARNESS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
LEFT_OUT = ("openbookqa", "piqa")


@experiment(PAPER, published=True)
def differential(scale: str) -> Iterator[Study]:
    """V1 and V2 against one map, on text with needles in it."""
    length = TABLES[scale].train.sequence_length
    schemes, depths = ("logits8-tensor", "logits6-tensor", "logits4-tensor"), (0.0, 0.5, 1.0)
    questions = {
        "retrieval": evaluate(
            tasks=("perplexity", "needles", "allocation"),
            lengths=(length, 2 * length),
            tokens=16_384,
            needles={"grid": ("1x1", "2x2", "6x2"), "depths": depths},
            allocation={"depths": depths},
        ),
        "bits": quantize(scheme=schemes, length=length, tokens=16_384),
        "logits": diagnose(length=length),  # of table 5; training does not measure the largest
    }
    table = replace(TABLES[scale], label="differential", questions=questions)
    # The interventions: two maps, subtracted.
    yield from table.each(("transformer", "differential", "differential-v2"), *RATES[scale])


@experiment(PAPER, published=True)
def differential_ablations(scale: str) -> Iterator[Study]:
    """V1 without its parts, and with other numbers of heads."""
    table, rates = replace(TABLES[scale], label="differential ablations"), RATES[scale]
    yield table.arm("transformer", *rates)
    yield table.arm("transformer", *rates, num_attention_heads=8)
    yield table.arm("differential", *rates)
    # The interventions: the norm of each head, λ's start, the number of heads.
    yield table.arm("differential", *rates, head_norm="none")
    for start in (0.5, 0.8):
        yield table.arm("differential", *rates, lambda_init=start)
    yield table.arm("differential", *rates, num_attention_heads=8)


@experiment(PAPER, published=True)
def abilities(scale: str) -> Iterator[Study]:
    """V1 against one map: lm-eval's tasks (`tiny` reads the first questions of each), many-shot
    classification, summaries. Models of `tiny` and `small` guess."""
    tiny, rates = scale == "tiny", (3.2e-4,) if scale == "paper" else RATES[scale]
    table = RUNS["diff-3b"] if scale == "paper" else TABLES[scale]
    length = table.train.sequence_length
    shots = {"data": f"{BANKING}#train", "test": f"{BANKING}#test"}
    answers = evaluate(
        tasks=(*(one for one in HARNESS if not (tiny and one in LEFT_OUT)), "shots"),
        # No demonstration fits the window of `tiny` beside a text and the longest label.
        lengths=(2 * length if tiny else length,),
        lm_eval={"limit": 200 if tiny else None},
        shots={**shots, "queries": 30} if tiny else shots,
    )
    summaries = {"files": ("hf:EdinburghNLP/xsum#test",), "summary_tokens": length // 4}
    documents = evaluate(tasks=("hallucination",), lengths=(length,), hallucination=summaries)
    questions = {"answers": answers, "documents": documents}
    table = replace(table, label="abilities", questions=questions)
    yield from table.each(("transformer", "differential"), *rates)  # the intervention


@experiment(PAPER)
def differential_scaling(scale: str) -> Iterator[Study]:
    """V1 and one map at three widths, with tokens in proportion to the parameters."""
    whole, largest = BY_WIDTH[scale], WIDTHS[scale][-1]
    for width in WIDTHS[scale]:
        tokens = whole.train.tokens * width**2 // largest**2
        table = whole.changed(label=f"width {width}", tokens=tokens, width=width)
        yield from table.each(("transformer", "differential"), *RATES[scale])  # the intervention


@experiment(f"{PAPER}, arXiv 2311.01906")
def speed(scale: str) -> Iterator[Study]:
    """Throughput on the device that the record names; the claims compare ratios. Every seed is a
    round, one short run of each arm in turn, so that other load affects all arms alike."""
    table = Study(label="speed", size=scale, seeds=tuple(range(6)), lengths=())
    # fmt: off
    table = {
        "tiny": table.changed(
            layers=4, width=256, heads=8, length=256, batch_size=4, tokens=24_576, log_every=4),
        "small": table.changed(
            layers=12, width=1024, heads=16, length=2048, batch_size=16, tokens=786_432,
            compile="blocks", log_every=4),
    }[scale]
    # fmt: on
    interventions = ("differential", "differential-v2", "sas", "sas-p", "clearhead")
    yield from table.each(("transformer", *interventions), 1e-3)


# The claims

V1, V2, BASE = "differential", "differential-v2", "transformer"
_SHOTS: dict[str, Any] = {"task": "shots", "order": "random"}
_RIGHT, _NAMES = number("accuracy", **_SHOTS), number("names_above_chance", task="hallucination")
_LOGITS, _LOGITS_6 = (number("added_perplexity", scheme=f"logits{n}-tensor") for n in (4, 6))
_OUTLIERS = Gate(number("kurtosis").of(BASE), 4, "kurtosis of the baseline")
_DEAR = Gate(_LOGITS.of(BASE), 0.5, "what 4 bits add to the baseline's perplexity")

# fmt: off
CLAIMS = (
    Claim("diff/table1",
        "Differential attention answers more of lm-eval's tasks after the same tokens.",
        "3B, 1T tokens: 60.6 against 56.8 % on average; 350B tokens of the same text (table 8): "
        "56.2 against 55.4 %", "abilities",
        (higher("mean accuracy on lm-eval's tasks (five at `tiny`)", number("acc"), V1, BASE,
            least=0.43),), also=("diff/table8",)),
    Claim("diff/figure3",
        "Differential attention reaches a Transformer's loss with fewer parameters or tokens.",
        "62 to 65 % of the parameters, or of the tokens", "differential-scaling",
        (lower("loss at this width", number("loss", times=1, label="width *"), V1, BASE),)),
    Claim("diff/figure4", "Differential attention's perplexity is lower, within the training "
        "length and far beyond it.",
        "loss lower at every position to 64K, within the training length", "long-context",
        tuple(lower(f"perplexity at {where} training length", number("perplexity", times=times,
            task="perplexity", scaling="none"), V1, BASE)
            for where, times in (("the", 1), ("16 × the", 16)))),
    Claim("diff/table2", "Differential attention finds several needles among others more often.",
        "0.85 against 0.55, two of six needles at 4K", "differential",
        tuple(higher(words, number("accuracy", task="needles", needles=n, queries=q), V1, BASE)
            for words, n, q in (
                ("two of six needles found", 6, 2), ("a single needle found", 1, 1))),
        also=("diff/figure5",)),
    Claim("diff/table3",
        "Differential attention puts more weight on the answer and less on the rest.",
        "0.27 to 0.40 on the answer, against 0.03 to 0.09", "differential",
        (higher("attention on the answer", number("answer_share", task="allocation"), V1, BASE),
        lower("attention on other text before the question",
            number("noise_share", task="allocation"), V1, BASE))),
    Claim("diff/figure6", "Differential attention classifies better from many demonstrations.",
        "+5.2 to +21.6 points", "abilities",
        (higher("share of texts classified rightly", _RIGHT, V1, BASE, least=0.15),)),
    Claim("diff/figure7",
        "The order of demonstrations changes the answers of differential attention less.",
        "margins of 4 to 19 points against 10 to 56", "abilities",
        (lower("accuracy of the best order less the worst", number("margin", **_SHOTS), V1, BASE,
            *(Gate(_RIGHT.of(arm), 0.15, f"accuracy of {arm}") for arm in (V1, BASE))),)),
    Claim("diff/table4", "Differential attention hallucinates less in summaries and answers.",
        "+0.07 to +0.19 in the share free of hallucinations", "abilities",
        (lower("share of names in summaries that the document does not have",
            number("unsupported_names", task="hallucination"), V1, BASE,
            *(Gate(_NAMES.of(arm), 0.1, f"names above chance of {arm}") for arm in (V1, BASE))),)),
    Claim("diff/table5", "Hidden states of differential attention have smaller outliers.",
        "largest hidden state 3,608 to 1,688; largest logit 318 to 38.8", "differential",
        tuple(lower(words, number(metric), V1, BASE, _OUTLIERS) for words, metric in (
            ("largest hidden state", "largest_activation"),
            ("kurtosis of the hidden states", "kurtosis"),
            ("largest attention logit", "logit_top_1")))),
    Claim("diff/figure8",
        "The attention logits of differential attention can be quantised to fewer bits.",
        "4 bits as good as a Transformer's 6, by accuracy on HellaSwag", "differential",
        (lower("perplexity added by logits of 4 bits", _LOGITS, V1, BASE, _DEAR),
        no_worse("perplexity added by logits of 4 bits, against logits of 6 in the baseline",
            _LOGITS, V1, _LOGITS_6.of(BASE), _DEAR, by=0.3))),
    Claim("diff/table6", "Without the norm of each head V1's loss is higher; λ's start matters "
        "little; half the baseline's heads is right.",
        "1.4B: loss 3.062; without the norm of each head 3.122; baseline 3.087",
        "differential-ablations",
        (higher("loss without the norm of each head", LOSS, f"{V1} · head_norm none", V1),
        no_worse("loss with λ's start 0.5 in all layers", LOSS, f"{V1} · lambda_init 0.5", V1,
            by=0.01),
        no_worse("loss with a quarter of the baseline's number of heads", LOSS,
            f"{V1} · num_attention_heads 8", V1, by=0.01, better="higher"),
        no_worse("loss with λ's start 0.8 in all layers, against the baseline's", LOSS,
            f"{V1} · lambda_init 0.8", BASE, by=0.02))),
    Claim("diff/v2", "Differential attention's second version learns better than the baseline, "
        "and no worse than the first.",
        "loss lower by 0.02 to 0.03 after 1T tokens", "differential",
        (lower("loss of V2 against the baseline's", LOSS, V2, BASE),
        no_worse("loss of V2 against V1's", LOSS, V2, V1, by=0.01))),
    Claim("diff/speed", "Differential attention slows training down little.",
        "9 to 12 % fewer tokens a second", "speed",
        tuple(ratio(f"tokens a second of {name} against the baseline's, on the record's device",
            number("tokens_per_second", label="speed"), arm, BASE, at_least=0.88)
            for name, arm in (("V1", V1), ("V2", V2))), also=("diff/table7",)),
)
# fmt: on
