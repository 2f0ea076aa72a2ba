"""Published training runs as comparisons: a size, the presets trained at it, and the settings.

docs/recipes.md names what each paper leaves open or contradicts, and what was chosen there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from clearhead.data import DataConfig
from clearhead.experiments.configs import CompareConfig
from clearhead.train import TrainConfig

DIFF, COCA = "arXiv 2410.05258", "arXiv 2309.08646"
SAS, OUTLIERS = "arXiv 2311.01906", "arXiv 2410.17174"
_PILE = DataConfig(data=("hf:monology/pile-uncopyrighted",), vocabulary=50_000)
_WEB = DataConfig(data=("hf:cerebras/SlimPajama-627B",), tokenizer="Xenova/gpt-4")
_C4_BYTES = 80_000_000_000  # read of C4, above what the longest run sees
_MAPS = ("transformer", "differential")
_ALWAYS: dict[str, Any] = {"compile": "blocks", "log_every": 20}


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A training run of a paper, of each preset that it compares.

    Attributes:
        parameters: as the paper names the model.
        size: of the presets, which the run is named after.
        settings: of `CompareConfig`.
        continues: the size whose checkpoint the run goes on from, if it does.
    """

    paper: str
    parameters: str
    size: str
    settings: Mapping[str, Any]
    continues: str = ""

    @property
    def config(self) -> CompareConfig:
        """`clearhead compare` of the presets."""
        return CompareConfig(size=self.size, lengths=(1,), **self.settings)

    @property
    def train(self) -> TrainConfig:
        train: TrainConfig = self.settings["train"]
        return train


def _diff(parameters: str, size: str, rate: float) -> PublishedRun:
    """A model of the scaling study (appendix E): 40 thousand steps of 0.25 M tokens."""
    train = TrainConfig(
        tokens=40_000 * 2**18,
        sequence_length=2048,
        batch_size=8,
        accumulation=16,
        learning_rate=rate,
        betas=(0.9, 0.98),
        weight_decay=0.05,
        schedule="linear",
        warmup=375 / 40_000,
        final_learning_rate=0.0,
        save_every=1000,
        **_ALWAYS,
    )
    return PublishedRun(
        paper=DIFF,
        parameters=parameters,
        size=size,
        settings={"presets": _MAPS, "train": train, "data": _WEB},
    )


def _diff_3b(size: str, continues: str = "", **changes: Any) -> PublishedRun:
    """The 3B models of 350B tokens (appendix B and D): batches of 4 M tokens of 4,096 each."""
    train = TrainConfig(
        tokens=350_000_000_000,
        sequence_length=4096,
        batch_size=4,
        accumulation=256,
        learning_rate=3.2e-4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        schedule="linear",
        warmup=1000 / 83_446,
        final_learning_rate=0.04,
        save_every=1000,
        **_ALWAYS,
    )
    return PublishedRun(
        paper=DIFF,
        parameters="3B",
        size=size,
        settings={"presets": _MAPS, "train": replace(train, **changes), "data": _WEB},
        continues=continues,
    )


def _codeparrot(parameters: str, size: str, tokens: int) -> PublishedRun:
    """Appendix D.1; where it gives no rate (parallel, the variants of SAS) it is that of Pre-LN."""
    train = TrainConfig(
        tokens=tokens,
        sequence_length=128,
        batch_size=32,
        accumulation=4,
        betas=(0.9, 0.999),
        schedule="linear",
        warmup=0.05,
        final_learning_rate=0,
        save_every=1000,
        **_ALWAYS,
    )
    data = DataConfig(
        data=("hf:huggingface-course/codeparrot-ds-train",),
        text_field="content",
        tokenizer="huggingface-course/code-search-net-tokenizer",
    )
    return PublishedRun(
        paper=SAS,
        parameters=parameters,
        size=size,
        settings={"presets": ("transformer", "sas", "sas-p"), "train": train, "data": data},
    )


def _crammed() -> PublishedRun:
    """Appendix D.2; weight decay is SAS's 0.1."""
    train = TrainConfig(
        tokens=5_000_000_000,
        sequence_length=128,
        batch_size=64,
        accumulation=128,
        ramp=0.6,
        schedule="triangle",
        warmup=0.75,
        final_learning_rate=0,
        betas=(0.9, 0.98),
        epsilon=1e-12,
        clip=0.5,
        save_every=200,
        **_ALWAYS,
    )
    return PublishedRun(
        paper=SAS,
        parameters="120M",
        size="crammed",
        settings={
            "presets": ("bert", "bert-sas", "bert-sas-p"),
            "rates": {"bert-sas*": 3e-3},
            "train": train,
            "data": replace(_PILE, vocabulary=32_768),
        },
    )


def _coca() -> PublishedRun:
    """Section 4.1: two epochs of 50 B tokens."""
    train = TrainConfig(
        tokens=100_000_000_000,
        sequence_length=512,
        batch_size=32,
        accumulation=8,
        learning_rate=1e-4,
        schedule="linear",
        warmup=0.01,
        save_every=1000,
        **_ALWAYS,
    )
    presets = ("transformer", "alibi", "coca-slack", "coca-strict")
    return PublishedRun(
        paper=COCA,
        parameters="350M",
        size="coca-350m",
        settings={"presets": presets, "train": train, "data": _PILE},
    )


def _outliers(
    parameters: str,
    size: str,
    steps: int,
    preset: Literal["gpt2", "transformer"] = "gpt2",
    tokenizer: str = "openai-community/gpt2",
) -> PublishedRun:
    """GaLore's steps and batch (arXiv 2403.03507), which has the data, length and sizes."""
    train = TrainConfig(
        tokens=steps * 512 * 256,
        sequence_length=256,
        batch_size=64,
        accumulation=8,
        learning_rate=1e-3,
        save_every=500,
        **_ALWAYS,
    )
    return PublishedRun(
        paper=OUTLIERS,
        parameters=parameters,
        size=size,
        settings={
            "presets": (preset,),
            "set": {"norm": "rmsnorm-single"},
            "vary": {
                "normalizer": ("softmax", "softmax1"),
                "train.optimizer": ("adamw", "orthoadam"),
            },
            "train": train,
            "data": DataConfig(data=("hf:allenai/c4:en",), tokenizer=tokenizer, limit=_C4_BYTES),
        },
    )


_ALL = (
    _diff("830M", "diff-830m", 1.5e-4),
    _diff("1.4B", "diff-1.4b", 1.5e-4),
    _diff("2.8B", "diff-2.8b", 1.5e-4),
    _diff("6.8B", "diff-6.8b", 7.5e-5),
    _diff("13.1B", "diff-13.1b", 7.5e-5),
    _diff_3b("diff-3b"),
    _diff_3b(
        "diff-3b-64k",
        continues="diff-3b",
        tokens=1_500_000_000,
        sequence_length=65_536,
        batch_size=1,
        accumulation=64,
        learning_rate=8e-5,
        schedule="constant",
        warmup=0.0,
        save_every=100,
    ),
    _coca(),
    _codeparrot("167M", "codeparrot", 704_512_000),
    _codeparrot("379M", "codeparrot-72", 327_680_000),
    _crammed(),
    _outliers("60M", "gpt2-60m", 10_000),
    _outliers("130M", "gpt2-130m", 20_000),
    _outliers("350M", "gpt2-350m", 60_000),
    _outliers("1.4B", "gpt2-1.4b", 100_000),
    _outliers("130M", "llama-130m", 20_000, "transformer", "hf-internal-testing/llama-tokenizer"),
)
RUNS: Mapping[str, PublishedRun] = {one.size: one for one in _ALL}
