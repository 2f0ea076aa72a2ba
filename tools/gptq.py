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
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LENGTH = 512  # tokens of a window
WEIGHTS = "model.safetensors"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", required=True, help="a file or folder of text")
    parser.add_argument("--windows", type=int, default=16, help=f"of {LENGTH} tokens")
    parser.add_argument("--group", type=int, default=64, help="inputs that share a scale")
    options = parser.parse_args()
    from clearhead.lab.runs import load_model

    model, tokenizer = load_model(str(options.model), trust_remote_code=False)
    windows = drawn(tokenizer, options.text, options.windows)
    write(options.model, options.folder, rounded(model, windows, options.group))
    return 0


def drawn(tokenizer: Any, text: str, count: int) -> list[Tensor]:
    """int64 [512] each, at most `count`, from all of the text; of seed 1."""
    from clearhead.data import DataConfig, prepare, windows
    from clearhead.errors import ClearheadError

    try:
        corpus = prepare(DataConfig(data=(text,)), tokenizer=tokenizer, progress=print)
        return list(windows(corpus, split="train", length=LENGTH, count=count, seed=1))
    except ClearheadError as error:
        raise SystemExit(f"gptq: {error}") from None


def rounded(model: Any, windows: list[Tensor], group: int) -> dict[str, Tensor]:
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
    ids = [window.tolist() for window in windows]
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
    from clearhead.errors import ClearheadError
    from clearhead.records.files import publish_folder

    before = load_file(model / WEIGHTS)
    if unknown := weights.keys() - before.keys():
        raise SystemExit(f"{model / WEIGHTS} has no {min(unknown)}")
    after = {name: weights[name].to(before[name].dtype) for name in weights}
    # A manifest holds the checksum of the weights that are replaced.
    others = shutil.ignore_patterns("manifest.json", WEIGHTS)
    try:
        with publish_folder(folder) as temporary:
            shutil.copytree(model, temporary, ignore=others, dirs_exist_ok=True)
            save_file({**before, **after}, temporary / WEIGHTS, metadata={"format": "pt"})
    except ClearheadError as error:
        raise SystemExit(f"gptq: {error}") from None


if __name__ == "__main__":
    raise SystemExit(main())
