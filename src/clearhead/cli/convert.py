"""clearhead convert: a model in another library's format, or on other mechanisms."""

from clearhead.cli.options import parse
from clearhead.lab.sweep_configs import ConvertConfig as Command
from clearhead.terminal import show


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="convert",
        description="Write a model of transformers as a clearhead model, or back, after both gave "
        "the same logits; or with --to on other mechanisms, and print its distance from the "
        "original. A run's checkpoint becomes an ordinary folder of the same model.",
        examples=(
            "./SmolLM2-135M ./smollm2-clearhead",
            "./SmolLM2-135M ./smollm2-sink --to sink --calibrate ./books",
            "./SmolLM2-135M ./smollm2-few-bits --prefix auto --rotate down --calibrate ./books",
            "runs/train/final ./served --for serving",
            "runs/train/final ./for-llama-cpp --for llama.cpp",
        ),
        presets=True,
    )
    from clearhead.lab.converting import run_conversion

    for line in run_conversion(command):
        show(line)
    return 0
