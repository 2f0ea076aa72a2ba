"""Published training runs as comparisons; docs/recipes.md names what each paper leaves open."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from shlex import join
from typing import Any

from clearhead.papers.study import Study
from clearhead.settings.train import TrainConfig

RUNS: dict[str, Study] = {}
"""{size: a training run of a paper as a comparison of its presets}; the label names both."""
RATES = {"bert-sas": 3e-3, "bert-sas-p": 3e-3}  # of presets that have their own


def _add(paper: str, sizes: Mapping[str, str], *presets: str, **settings: Any) -> None:
    """Add the runs of a recipe: {size: parameters}, and settings by their names in `changed`."""
    for size, parameters in sizes.items():
        train = TrainConfig(compile="blocks", log_every=20)
        study = Study(presets=presets, size=size, seeds=(0,), train=train)
        RUNS[size] = study.changed(label=f"{parameters} of {paper}", **settings)


# fmt: off
_DIFF, _SLIMPAJAMA = ("transformer", "differential"), ("hf:cerebras/SlimPajama-627B",)
_PILE = ("hf:monology/pile-uncopyrighted",)
# The scaling study of arXiv 2410.05258 (appendix E): 40 thousand steps of 0.25 M tokens.
for _rate, _sizes in (
    (1.5e-4, {"diff-830m": "830M", "diff-1.4b": "1.4B", "diff-2.8b": "2.8B"}),
    (7.5e-5, {"diff-6.8b": "6.8B", "diff-13.1b": "13.1B"}),
):
    _add("arXiv 2410.05258", _sizes, *_DIFF, data=_SLIMPAJAMA, tokenizer="Xenova/gpt-4",
        tokens=10_485_760_000, sequence_length=2048, batch_size=8, accumulation=16,
        learning_rate=_rate, betas=(0.9, 0.98), weight_decay=0.05, schedule="linear",
        warmup=0.009375, final_learning_rate=0.0, save_every=1000)  # 375 steps of warmup
# Its 3B models of 350B tokens (appendix B and D): batches of 4 M tokens of 4,096 each, and a
# warmup of 1000 of 83,446 steps.
_add("arXiv 2410.05258", {"diff-3b": "3B"}, *_DIFF, data=_SLIMPAJAMA, tokenizer="Xenova/gpt-4",
    tokens=350_000_000_000, sequence_length=4096, batch_size=4, accumulation=256,
    learning_rate=3.2e-4, betas=(0.9, 0.95), weight_decay=0.1, schedule="linear",
    warmup=0.011983797905232126, final_learning_rate=0.04, save_every=1000)
_add("arXiv 2410.05258", {"diff-3b-64k": "3B (from diff-3b)"}, *_DIFF, data=_SLIMPAJAMA,
    tokenizer="Xenova/gpt-4", tokens=1_500_000_000, sequence_length=65_536, batch_size=1,
    accumulation=64, learning_rate=8e-5, betas=(0.9, 0.95), weight_decay=0.1, schedule="constant",
    warmup=0.0, final_learning_rate=0.04, save_every=100)
# Section 4.1 of arXiv 2309.08646: two epochs of 50 B tokens.
_add("arXiv 2309.08646", {"coca-350m": "350M"}, "transformer", "alibi", "coca-slack", "coca-strict",
    data=_PILE, vocabulary=50_000, tokens=100_000_000_000, sequence_length=512, batch_size=32,
    accumulation=8, learning_rate=1e-4, schedule="linear", warmup=0.01, save_every=1000)
# Appendix D.1 of arXiv 2311.01906; where it gives no rate (parallel, the variants of SAS) it is
# that of Pre-LN.
for _sizes, _tokens in (
    ({"codeparrot": "167M"}, 704_512_000), ({"codeparrot-72": "379M"}, 327_680_000)
):
    _add("arXiv 2311.01906", _sizes, "transformer", "sas", "sas-p",
        data=("hf:huggingface-course/codeparrot-ds-train",), text_field="content",
        tokenizer="huggingface-course/code-search-net-tokenizer",
        tokens=_tokens, sequence_length=128, batch_size=32, accumulation=4, betas=(0.9, 0.999),
        schedule="linear", warmup=0.05, final_learning_rate=0, save_every=1000)
# Its appendix D.2; weight decay is SAS's 0.1.
_add("arXiv 2311.01906", {"crammed": "120M"}, "bert", "bert-sas", "bert-sas-p",
    data=_PILE, vocabulary=32_768, tokens=5_000_000_000,
    sequence_length=128, batch_size=64, accumulation=128, ramp=0.6,
    schedule="triangle", warmup=0.75, final_learning_rate=0, betas=(0.9, 0.98), epsilon=1e-12,
    clip=0.5, save_every=200)
# arXiv 2410.17174 by GaLore's steps and batch (arXiv 2403.03507), which has the data, length and
# sizes; of C4 80 GB are read, above what the longest run sees.
for _preset, _tokenizer, _sizes, _tokens in (
    ("gpt2", "openai-community/gpt2", {"gpt2-60m": "60M"}, 1_310_720_000),
    ("gpt2", "openai-community/gpt2", {"gpt2-130m": "130M"}, 2_621_440_000),
    ("gpt2", "openai-community/gpt2", {"gpt2-350m": "350M"}, 7_864_320_000),
    ("gpt2", "openai-community/gpt2", {"gpt2-1.4b": "1.4B"}, 13_107_200_000),
    ("transformer", "hf-internal-testing/llama-tokenizer", {"llama-130m": "130M"}, 2_621_440_000),
):
    _add("arXiv 2410.17174", _sizes, _preset, norm="rmsnorm-single",
        vary={"normalizer": ("softmax", "softmax1"), "train.optimizer": ("adamw", "orthoadam")},
        data=("hf:allenai/c4:en",), tokenizer=_tokenizer, limit=80_000_000_000,
        tokens=_tokens, sequence_length=256, batch_size=64, accumulation=8, learning_rate=1e-3,
        save_every=500)
# fmt: on


def commands() -> Iterator[str]:
    """Each run in a line, and the commands that train its arms."""
    from clearhead.models import plan, preset

    for size, run in RUNS.items():
        first = run.arms[0]
        count = plan(preset(first.preset, size, **first.model)).parameters
        yield f"# {size}: {run.label}; {count:,} parameters, {run.train.tokens:,} tokens"
        for arm in run.arms:
            words = ["clearhead", "train", arm.preset, "--size", size]
            keys = [f"{key}={value}" for key, value in arm.model.items()]
            train = replace(arm.train, learning_rate=RATES.get(arm.preset, arm.train.learning_rate))
            words += ["--set", *keys] if keys else []
            yield join([*words, *_options("train", train), *_options("data", run.data)])


def _options(part: str, settings: Any) -> Iterator[str]:
    """The words that make these settings, but for those that have their defaults."""
    for one in fields(settings):
        value = getattr(settings, one.name)
        if value != getattr(type(settings)(), one.name):
            yield f"--{part}.{one.name.replace('_', '-')}"
            yield from map(str, value if isinstance(value, tuple) else (value,))
