"""GPTQ (arXiv 2210.17323) by llm-compressor: weights of 4 bits that are fitted to a text.

    python tools/gptq.py MODEL FOLDER --text books-train.jsonl.gz

writes a copy of a model's folder with its linear layers' weights rounded, by zero-point with a
scale 64 inputs, and stored as floats; the embedding and the head are kept. Any folder that
clearhead opens can be read, also one with a prefix or with rotated down projections. `clearhead
quantize FOLDER --scheme a8-token` measures it with activations in 8 bits.

llm-compressor 0.14 asks for transformers up to 5.17, so it has an environment of its own:

    python -m venv gptq && gptq/bin/pip install . llmcompressor==0.14.0.1
"""

import argparse
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LENGTH = 512  # tokens of a window
CHARACTERS = 400_000  # of a document, enough to draw a window from
WEIGHTS = "model.safetensors"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="documents, .jsonl.gz")
    parser.add_argument("--windows", type=int, default=16, help=f"of {LENGTH} tokens")
    parser.add_argument("--group", type=int, default=64, help="inputs that share a scale")
    options = parser.parse_args()
    from clearhead.experiments.run_setup import load_model

    model, tokenizer = load_model(str(options.model), trust_remote_code=False)
    drawn = windows(tokenizer, options.text, options.windows)
    write(options.model, options.folder, rounded(model, drawn, options.group))
    return 0


def windows(tokenizer: Any, text: Path, count: int) -> list[Tensor]:
    """int64 [512] each, at random places of the first `count` documents in turn; of seed 0."""
    with gzip.open(text, "rt", encoding="utf-8") as lines:
        documents = [
            torch.tensor(tokenizer(json.loads(line)["text"][:CHARACTERS])["input_ids"])
            for line, _ in zip(lines, range(count), strict=False)
        ]
    if not documents or min(map(len, documents)) <= LENGTH:
        raise SystemExit(f"{text}: a document has no more than {LENGTH} tokens: give longer ones")
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for index in range(count):
        ids = documents[index % len(documents)]
        start = int(torch.randint(0, len(ids) - LENGTH, (1,), generator=generator))
        drawn.append(ids[start : start + LENGTH])
    return drawn


def rounded(model: Any, drawn: list[Tensor], group: int) -> dict[str, Tensor]:
    """Weights after GPTQ, dequantised, by parameter."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    from clearhead.quantize import linear_layers

    layers = linear_layers(model)
    args = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": group}
    how = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args, observer="mse"))
    linear = (name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear))
    ids = [window.tolist() for window in drawn]
    oneshot(
        model=model,
        dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * LENGTH] * len(ids)}),
        recipe=[
            GPTQModifier(
                config_groups={"all": how}, ignore=[name for name in linear if name not in layers]
            )
        ],
        pipeline="basic",  # whole forward passes: its tracer cannot follow clearhead's models
        num_calibration_samples=len(ids),
        max_seq_length=LENGTH,
    )
    return {f"{name}.weight": layer.weight.data for name, layer in layers.items()}


def write(model: Path, folder: Path, weights: dict[str, Tensor]) -> None:
    """Copy the folder of `model` with other weights of the same names, shapes and dtypes."""
    before = load_file(model / WEIGHTS)
    if unknown := weights.keys() - before.keys():
        raise SystemExit(f"{model / WEIGHTS} has no {min(unknown)}")
    after = {name: weights[name].to(before[name].dtype) for name in weights}
    # A manifest holds the checksum of the weights that are replaced.
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("manifest.json"))
    save_file({**before, **after}, folder / WEIGHTS, metadata={"format": "pt"})


if __name__ == "__main__":
    raise SystemExit(main())
