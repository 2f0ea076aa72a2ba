"""Which parts of a block can go: arXiv 2311.01906, figures 3, 6 and 13.

`paper` is CodeParrot's recipe (D.1), one seed as there; where it gives no rate (parallel, the
variants of SAS) it is that of Pre-LN.
"""

from clearhead.data import DataConfig
from clearhead.experiments.reproduce.study import Arm, Study

# Layers → rates.
PRE_LN = {6: ("2e-3", "4e-3", "8e-3"), 24: ("1e-3", "2e-3", "4e-3"), 18: ("1e-3",), 72: ("1e-3",)}
SKIPLESS = {6: ("1e-3", "2e-3", "4e-3"), 24: ("5e-4", "1e-3", "2e-3"), 18: ("3e-4",), 72: ("1e-4",)}
SAS = PRE_LN | {6: ("4e-3", "8e-3", "1.6e-2"), 24: ("2e-3", "4e-3", "8e-3")}
NO_NORM = SAS | {24: ("1e-3", "2e-3", "4e-3", "8e-3")}
VALUES = {"values": "reparametrised", "projections": "reparametrised"}
CODEPARROT = DataConfig(
    data=("hf:huggingface-course/codeparrot-ds-train",),
    text_field="content",
    tokenizer="huggingface-course/code-search-net-tokenizer",
)
EVERY = (
    *("--train.sequence-length", "128", "--train.log-every", "20"),
    *("--lengths", "1", "--evaluation-tokens", "131072"),
)


def _study(layers: int, tokens: int, sweep: int, *options: str, paper: bool = False) -> Study:
    arms = [  # preset, rates, what is changed of the preset
        Arm("transformer", PRE_LN[layers]),
        Arm("parallel", PRE_LN[layers]),
        Arm("skipless", SKIPLESS[layers]),
        Arm("skipless", SKIPLESS[layers], {"shaping": "skipinit"}),
        Arm("sas", SAS[layers]),
        Arm("sas-p", SAS[layers]),
        Arm("sas-p-nonorm", NO_NORM[layers]),
    ]
    if layers in (6, 18):
        arms += [Arm("sas", SAS[layers], {"mlp_gain": gain}) for gain in (0.05, 0.3, 1.0)]
        arms.append(Arm("sas", PRE_LN[layers], VALUES))
        arms.append(Arm("sas", SAS[layers], VALUES | {"value_gain": 0.2}))
    return Study(
        name=f"{layers} layers",
        arms=tuple(arms),
        tokens=tokens,
        sweep_tokens=sweep,
        options=(*EVERY, *options),
        measure=("--measure-every", "0.1"),
        text=CODEPARROT if paper else DataConfig(),
        seeds=(0,) if paper else (0, 1, 2),
    )


def _shape(layers: int, width: int, batch: int) -> tuple[str, ...]:
    sizes = (f"num_hidden_layers={layers}", f"hidden_size={width}", "num_attention_heads=4")
    batches = ("--train.batch-size", str(batch))
    return ("--set", *sizes, "mlp=relu", "max_position_embeddings=128", *batches)


COMPILED = ("--train.compile", "blocks")
PUBLISHED = (
    *("--train.batch-size", "32", "--train.accumulation", "4", "--train.betas", "0.9", "0.999"),
    *("--train.schedule", "linear", "--train.warmup", "0.05", "--train.final-learning-rate", "0"),
    *(*COMPILED, "--train.save-every", "1000"),
)
SCALES = {
    "tiny": (_study(6, 600_000, 300_000, *_shape(6, 128, 8)),),
    "small": (
        _study(6, 8_192_000, 4_096_000, *_shape(6, 256, 64), *COMPILED),
        _study(24, 4_915_200, 2_048_000, *_shape(24, 256, 64), *COMPILED),
    ),
    "paper": (
        _study(18, 704_512_000, 0, "--size", "codeparrot", *PUBLISHED, paper=True),
        _study(72, 327_680_000, 0, "--size", "codeparrot-72", *PUBLISHED, paper=True),
    ),
}
