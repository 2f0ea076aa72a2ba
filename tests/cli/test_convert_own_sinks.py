"""clearhead convert of models that have learned sinks: those are trained, and stay as they are."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteSWAConfig, GraniteSWAForCausalLM

from .conftest import call, refusal, saved

SHORT = ("--length", "24", "--windows", "2")


@pytest.fixture
def granite(tokenizer, tmp_path: Path) -> Path:
    """The folder of a tiny GraniteSWA with random sinks."""
    folder = tmp_path / "granite"
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = GraniteSWAForCausalLM(GraniteSWAConfig(vocab_size=len(tokenizer), **shape))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def hybrid(tokenizer, tmp_path: Path) -> Path:
    """The folder of a clearhead model whose last layer alone has sinks, with logits of 1.5."""
    overrides = [{}, {"normalizer": "sink"}]
    folder = saved(tmp_path / "hybrid", tokenizer, layer_overrides=overrides)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.constant_(model.model.layers[1].self_attn.normalizer.logit, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("to", ["gated", "sink"])
def test_trained_sinks_are_neither_calibrated_nor_set(to, granite, text, tmp_path, capsys):
    made = tmp_path / "made"
    words = ("convert", granite, made, *SHORT, "--to", to)
    said = refusal(capsys, *words, "--calibrate", text)
    assert "a model's own stay as they are" in said
    assert "a model keeps its own" in refusal(capsys, *words, "--sink-logit", 0)
    said = refusal(capsys, *words[:3], "--prefix", "a", *SHORT)
    assert "layer 0 has 'sink', where queries need no first token: leave --prefix out" in said
    said = refusal(capsys, *words, "annealed_start=true")
    assert "normalizer='sink' already, and annealed_start=true would begin without it" in said
    assert not made.exists()
    assert call(*words, "--text", text) == 0
    theirs, ours = map(AutoModelForCausalLM.from_pretrained, (granite, made))
    for before, after in zip(theirs.model.layers, ours.model.layers, strict=True):
        assert torch.equal(before.self_attn.sinks, after.self_attn.normalizer.logit)


def test_calibration_is_refused_where_weights_are_differences(tokenizer, text, tmp_path, capsys):
    source, made = saved(tmp_path / "source", tokenizer, maps="differential"), tmp_path / "made"
    said = refusal(capsys, "convert", source, made, "--to", "sink", "--calibrate", text, *SHORT)
    assert "--calibrate is not for maps='differential': choose maps=single or" in said
    assert not made.exists()


@pytest.mark.parametrize("option", [("--calibrate", None), ("--sink-logit", "0.5")])
def test_the_sinks_that_a_conversion_adds_are_set_beside_trained_ones(
    option, hybrid, text, tmp_path
):
    made, (name, value) = tmp_path / "made", option
    words = ("--to", "sink", "layer_overrides=null", name, value or text, *SHORT)
    assert call("convert", hybrid, made, *words) == 0
    first, second = (
        layer.self_attn.normalizer.logit
        for layer in AutoModelForCausalLM.from_pretrained(made).model.layers
    )
    assert torch.equal(second, torch.full_like(second, 1.5))
    assert bool((first.abs() < 20).all())
