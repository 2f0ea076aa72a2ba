"""Claims on differential attention: arXiv 2410.05258, and its authors' later version."""

from typing import Any

from clearhead.reproduce.contrasts import (
    LOSS,
    Claim,
    higher,
    lower,
    no_worse,
    number,
    ratio,
    reaches,
)

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
