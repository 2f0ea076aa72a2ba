"""The repairs of `together`, and what their main effects are measured by."""

from clearhead.reproduce.verbs import number

CONFIRMED_ON = (3, 4, 5)  # seeds that did not choose the composition
# Repair → patterns of the arms with it and without it.
REPAIRS = {
    "maps=differential-v2": ("*maps differential-v2*", "*maps single*"),
    "normalizer=softmax1": ("*normalizer softmax1*", "*normalizer softmax ·*"),
    "blocks of sas-p": ("sas-p · *", "transformer · *"),
    "position=alibi": ("*position alibi*", "*position rope*"),
    "epilogue=gate": ("*epilogue gate*", "*epilogue none*"),
    "train.optimizer=orthoadam": ("* orthoadam", "* adamw"),
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
