"""Hugging Face's Trainer with a model and optimizers of ours: hf_trainer.py FOLDER OPTIMIZER….

The first process writes the losses to FOLDER/OPTIMIZER.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from clearhead import ClearheadForCausalLM, preset
from clearhead.optim import OrthoAdam


def main(folder, optimizer):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"normalizer": "softmax1", "annealed_start": True}
    model = ClearheadForCausalLM(preset("differential", vocab_size=61, **shape))
    rows = torch.randint(0, 61, (16, 16), generator=torch.Generator().manual_seed(1))
    settings = TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
        logging_steps=1,
        learning_rate=1e-2,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        settings,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizer_cls_and_kwargs=(OrthoAdam, {"lr": 1e-2}) if optimizer == "orthoadam" else None,
    )
    trainer.train()
    assert all(layer.self_attn.normalizer.offset.item() == 0 for layer in model.model.layers)
    if trainer.is_world_process_zero():
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        (folder / f"{optimizer}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        main(Path(sys.argv[1]), name)
    os._exit(0)
