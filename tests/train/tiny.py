"""A model and batches small enough to train in a blink; as a program, a run to be killed."""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from clearhead import ClearheadForMaskedLM, preset
from clearhead.data import MaskedBatches, Masking
from clearhead.errors import ClearheadError
from clearhead.train import Callback, Progress, TrainConfig, train

VOCABULARY = 61


def make_model(**overrides):
    """A Llama of two layers. Dropout makes the random state part of the trajectory."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "max_position_embeddings": 64, "vocab_size": VOCABULARY}
    settings = {"attention_dropout": 0.1, "tie_word_embeddings": True}
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**shape | settings | overrides))


def make_config(**overrides):
    """12 steps of 2 windows of 16 tokens."""
    tokens = 12 * 2 * 16 * overrides.get("accumulation", 1)
    sizes = {"tokens": tokens, "sequence_length": 16, "batch_size": 2, "save_every": 4}
    return TrainConfig(**{**sizes, "learning_rate": 1e-2, "precision": "fp32", **overrides})


class Batches:
    """Random tokens as a pure function of the batch's number."""

    fingerprint = "tiny"
    begin: int | None = None

    def __init__(self, size=2, length=16):
        self.size = size
        self.length = length

    def batch(self, step):
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(0, VOCABULARY, (self.size, self.length), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}


def make_masked_batches(batches):
    tokenizer = SimpleNamespace(
        mask_token_id=VOCABULARY - 1,
        all_special_ids=[VOCABULARY - 1],
        get_vocab=lambda: {str(number): number for number in range(VOCABULARY)},
    )
    batches.seed = 3
    return MaskedBatches(batches, Masking(tokenizer))


def make_masked_model():
    """The crammed BERT in miniature, with dropout."""
    torch.manual_seed(7)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ClearheadForMaskedLM(preset("bert", vocab_size=VOCABULARY, dropout=0.1, **shape))


def settle(output):
    """Wait until no checkpoint is being written, so that a kill always finds the same ones."""
    while any(Path(output).glob("checkpoints/.writing-*")):
        time.sleep(0.01)


class SignalAt(Callback):
    """Sends this process a signal once a step is done, and so often."""

    def __init__(self, step, number, times=1):
        self.at = step
        self.number = number
        self.times = times

    def step(self, metrics):
        if metrics.step == self.at:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


class GoneAt(Callback):
    """Moves the run folder once a step is done."""

    def __init__(self, step):
        self.at = step

    def start(self, run):
        self.output = run.output

    def step(self, metrics):
        if metrics.step == self.at:
            self.output.rename(self.output.with_name("moved"))


def kill_before_publishing(event, arguments):
    """Die where all of a checkpoint is written, and nothing is published."""
    if event == "os.rename" and Path(arguments[1]).name.startswith("step-"):
        os.kill(os.getpid(), signal.SIGKILL)


class KilledIn(Batches):
    """Dies while a batch is being read: in the middle of a step."""

    def __init__(self, number, output):
        super().__init__()
        self.number = number
        self.output = output

    def batch(self, step):
        if step == self.number:
            settle(self.output)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(step)


def run(request):
    """Train as a request has it; the exit status."""
    callbacks, batches = [Progress()], Batches()
    if "signal" in request:
        callbacks.append(SignalAt(*request["signal"]))
    if "gone" in request:
        callbacks.append(GoneAt(request["gone"]))
    if "kill_in_batch" in request:
        batches = KilledIn(request["kill_in_batch"], request["output"])
    if "kill_in_save" in request:
        sys.addaudithook(kill_before_publishing)
    if room := request.get("file_limit"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    model, config = make_model(), make_config(**request["config"])
    if request.get("masked", False):
        model, batches = make_masked_model(), make_masked_batches(batches)
    how = {"output": Path(request["output"]), "resume": request["resume"]}
    result = train(model, batches, config, callbacks=callbacks, **how)
    return 128 + result.stop_signal if result.interrupted else 0


if __name__ == "__main__":
    try:
        sys.exit(run(json.loads(sys.argv[1])))
    except ClearheadError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
