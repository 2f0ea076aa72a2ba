"""The bill of a training run, against steps that were taken; and bytes by length of text."""

import json
from dataclasses import replace
from typing import get_args

import pytest
import tests_architectures as architectures
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

from clearhead.cli.plan import Kind
from clearhead.errors import ClearheadError
from clearhead.lab.bill import DEVICES, bill, record_memory, training_memory
from clearhead.lab.runs import new_model, objective_of
from clearhead.lab.sweep_configs import PlanConfig
from clearhead.models import plan, preset
from clearhead.optim import build_optimizer
from clearhead.train import TrainConfig
from clearhead.train.parallel import accumulate

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
TRAIN = TrainConfig(batch_size=4, sequence_length=64, precision="bf16")


def _peak(config, train, checkpointing=False):
    """Bytes that PyTorch's allocator held at most in two real steps."""

    def events(tree):
        for event in tree:
            yield event
            yield from events(event.children)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model = new_model(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = build_optimizer(model, train)
        ids_BT = torch.randint(512, (train.batch_size, train.sequence_length))
        labels_BT = ids_BT.clone()
        objective = objective_of(config)
        if objective == "mlm":  # a quarter is hidden
            labels_BT[:, torch.arange(train.sequence_length) % 4 != 0] = -100
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            accumulate(model, [{"input_ids": ids_BT, "labels": labels_BT}], "bf16", objective)
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            optimizer.step()
    tree = seen.profiler.kineto_results.experimental_event_tree()
    allocations = [each for each in events(tree) if each.tag == _EventType.Allocation]
    held = peak = 0
    for each in sorted(allocations, key=lambda one: one.start_time_ns):
        held += each.extra_fields.alloc_size
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize(
    ("name", "optimizer"), [("differential", "adamw"), ("bert", "adamw"), ("softmax1", "orthoadam")]
)
def test_memory_is_that_of_a_real_step(name, optimizer):
    config, train = preset(name, **SHAPE), replace(TRAIN, optimizer=optimizer)
    planned = training_memory(config, train)
    assert planned["peak"] == pytest.approx(_peak(config, train), rel=0.1)
    parts = sum(size for part, size in planned.items() if part != "peak")
    assert planned["peak"] == pytest.approx(parts)
    assert planned["weights"] == pytest.approx(4 * plan(config).parameters, rel=0.01)


def test_memory_with_checkpointing_is_that_of_a_real_step_and_less():
    config = preset("transformer", **{**SHAPE, "num_hidden_layers": 4})
    planned = training_memory(config, replace(TRAIN, checkpointing="blocks"))["peak"]
    assert planned == pytest.approx(_peak(config, TRAIN, checkpointing=True), rel=0.1)
    assert planned < 0.8 * training_memory(config, TRAIN)["peak"]


def test_another_library_s_model_is_counted_as_the_same_one_of_ours():
    gpt2 = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=512, n_positions=64)
    keys = {**SHAPE, "max_position_embeddings": 64, "intermediate_size": 256}
    assert plan(gpt2, length=64) == plan(preset("gpt2", **keys), length=64)
    assert plan(gpt2).parameters == GPT2LMHeadModel(gpt2).num_parameters()
    mistral = architectures.make("Mistral")
    assert plan(mistral.config).parameters == mistral.num_parameters()
    assert training_memory(gpt2, TRAIN)["peak"] > 0


def test_what_cannot_be_counted_is_refused_in_a_line():
    for name in ("Mamba", "Gemma2", "gpt-oss"):
        with pytest.raises(ClearheadError, match=r"cannot be planned: give .* llama, mistral"):
            bill(architectures.make(name).config, TRAIN, devices=["h100"])


def test_time_is_the_flops_over_the_rate_that_is_reached():
    train = replace(TRAIN, batch_size=64, accumulation=4, tokens=10**7)
    config = preset("transformer", **SHAPE)
    memory, estimates = bill(config, train, devices=["cpu", "h100"], numbers=(1, 4))
    forward = plan(config, length=train.sequence_length).forward_flops
    assert [each[:2] for each in estimates] == [("cpu", 1), ("h100", 1), ("h100", 4)]
    cpu, one, four = (seconds for *_, seconds, _ in estimates)
    assert one == pytest.approx(3 * forward * 10**7 / (0.4 * 989e12))
    assert four == pytest.approx(one / 4)
    assert cpu == pytest.approx(3 * forward * 10**7 / (0.4 * DEVICES["cpu"][0]))
    assert all(fits for *_, fits in estimates)
    for part in ("weights", "gradients", "optimizer"):
        assert memory[4][part] == memory[1][part] // 4
    assert memory[4]["activations"] == memory[1]["activations"]
    _, (longer,) = bill(config, replace(train, checkpointing="blocks"), devices=["h100"])
    assert longer[2] == pytest.approx(4 / 3 * one)


def test_what_cannot_be_planned_is_refused():
    config = preset("transformer", **SHAPE)
    with pytest.raises(ClearheadError, match="3 processes cannot share a step of accumulation 4"):
        bill(config, replace(TRAIN, accumulation=4), devices=["h100"], numbers=(3,))
    with pytest.raises(ClearheadError, match="adafactor cannot be planned"):
        training_memory(config, replace(TRAIN, optimizer="adafactor"))


TINY = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 300}


def test_cached_keys_of_coca_are_half_as_wide(tmp_path):
    path = tmp_path / "records.jsonl"
    names = ("transformer", "coca")
    lines = record_memory(PlanConfig(models=names, set=TINY, lengths=(16,), records=path))
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines
    assert lines[0]["train"]["precision"] == "bf16"  # as it is counted on every machine
    found = {(one["run"], one.get("metric")): one.get("value") for one in lines}
    assert found["transformer", "cached_key_bytes"] == 2 * 32
    assert found["coca", "cached_key_bytes"] == 32
    for name in names:  # what runs, beside what the mechanism declares
        assert found[name, "cached_bytes"] == plan(preset(name, **TINY)).cache_bytes


def test_kinds_of_devices_are_those_of_the_command_line():
    assert {*get_args(Kind)} == {*DEVICES}
