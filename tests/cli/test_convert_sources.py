"""Sources that `clearhead convert` and `train --from` take in, leave as they are, or refuse."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
)

from .conftest import call, refusal, rewritten, save, saved


@pytest.fixture
def source(llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama's folder, to be changed."""
    return Path(shutil.copytree(llama, tmp_path / "source"))


def _refused(capsys: pytest.CaptureFixture[str], folder: Path, going_on: list[str]) -> str:
    """The line that convert and train --from both end with, and that leaves nothing."""
    output = folder.with_name("output")
    said = refusal(capsys, "convert", folder, output)
    words = ("train", "gated", "--from", folder, "--output", output)
    assert refusal(capsys, *words, *going_on) == said
    assert not output.exists()
    return said


def test_weights_in_few_bits_beside_their_scales_are_refused(source, going_on, capsys):
    key = "model.layers.1.mlp.up_proj.weight"
    scale = {f"{key}_scale": torch.ones(1)}
    rewritten(source, lambda w: w.update(scale | {key: w[key].to(torch.float8_e4m3fn)}))
    said = _refused(capsys, source, going_on)
    assert f"has scales of weights in few bits (1 weight ({key}_scale))" in said


def _with_padding(tokenizer):
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})


def test_ids_beyond_the_embeddings_that_no_text_yields_are_left_alone(
    source, going_on, text, tmp_path
):
    """Not even a text that spells them."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    _with_padding(tokenizer)
    tokenizer.save_pretrained(source)
    assert len(AutoTokenizer.from_pretrained(source)) == 301
    spelt = tmp_path / "spelt.txt"
    spelt.write_text("[PAD] attention noise [PAD]\n" * 400, "utf-8")
    words = ("--to", "gated", "--text", spelt, "--length", "32")
    assert call("convert", source, tmp_path / "made", *words) == 0
    run = ("train", "--from", tmp_path / "made", "--output", tmp_path / "run")
    going_on[going_on.index("--data.data") + 1] = str(spelt)
    assert call(*run, *going_on) == 0


@pytest.mark.parametrize("token", ["end", "text"])
def test_ids_beyond_the_embeddings_that_texts_yield_are_refused(token, source, going_on, capsys):
    tokenizer = AutoTokenizer.from_pretrained(source)
    if token == "end":
        tokenizer.add_special_tokens({"eos_token": "[END]"})
    else:
        tokenizer.add_tokens(["attention!"])
    tokenizer.save_pretrained(source)
    said = _refused(capsys, source, going_on)
    assert "into ids up to 300, beyond the 300 embeddings of its model: restore" in said


def test_a_prefix_of_a_token_without_an_embedding_is_refused(source, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(source)
    _with_padding(tokenizer)
    tokenizer.save_pretrained(source)
    said = refusal(capsys, "convert", source, tmp_path / "made", "--prefix", "[PAD]")
    assert "token ids from 300 to 300, and the model knows 0 to 299" in said


def test_a_head_beside_the_embedding_to_which_it_is_tied_is_refused(source, going_on, capsys):
    path = source / "config.json"
    path.write_text(
        path.read_text("utf-8").replace('word_embeddings": false', 'word_embeddings": true')
    )
    said = _refused(capsys, source, going_on)
    assert "set tie_word_embeddings to false in config.json" in said
    rewritten(source, lambda weights: weights.pop("lm_head.weight"))
    assert call("convert", source, source.with_name("tied")) == 0


def test_weights_that_are_lost_are_named_as_the_cause(source, going_on, capsys):
    key = "model.layers.1.mlp.up_proj.weight"
    rewritten(source, lambda weights: weights[key][0].fill_(torch.nan))
    assert f"{key} of this LlamaForCausalLM has weights that are not finite" in (
        _refused(capsys, source, going_on)
    )


@pytest.mark.parametrize(
    ("verb", "words", "copies"),
    [
        ("convert", ("made", "--rotate", "down", "--equalise"), 10),
        ("quantize", ("--deploy", "int8-dynamic-tensor", "--output", "made"), 8),
        ("diagnose", ("--output", "made"), 4),
    ],
)
def test_too_little_memory_is_said_before_loading(
    verb, words, copies, llama, tmp_path, monkeypatch, capsys
):
    """Of float32 weights: two copies of 4 bytes, half as much again while rows are equalised."""
    if "--deploy" in words:
        pytest.importorskip("torchao")
    monkeypatch.chdir(tmp_path)
    count = sum(map(torch.numel, load_file(llama / "model.safetensors").values()))
    loads = list[object]()
    monkeypatch.setattr("clearhead.models.loading.pretrained", lambda *_, **__: loads.append(1))
    monkeypatch.setattr("clearhead.models.loading._GIB", 1)
    for free in (1, copies * count - 1):
        monkeypatch.setattr("clearhead.models.loading.available", lambda device, free=free: free)
        said = refusal(capsys, verb, llama, *words)
        wanted = float(said.partition("wants ")[2].partition(" GiB")[0])
        assert f"{verb} of {llama} wants " in said
        assert f", and {free:.1f} GiB are available" in said
        assert copies * count <= wanted < 1.2 * copies * count
    assert not loads
    assert not (tmp_path / "made").exists()


SHORT = ("--length", "24", "--windows", "2")


@pytest.fixture
def granite(tokenizer, tmp_path: Path) -> Path:
    """The folder of a tiny GraniteSWA with random sinks."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = GraniteSWAForCausalLM(GraniteSWAConfig(vocab_size=len(tokenizer), **shape))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return save(tmp_path / "granite", model, tokenizer)


@pytest.fixture
def hybrid(tokenizer, tmp_path: Path) -> Path:
    """The folder of a clearhead model whose last layer alone has sinks, with logits of 1.5."""
    overrides = [{}, {"normalizer": "sink"}]
    folder = saved(tmp_path / "hybrid", tokenizer, layer_overrides=overrides)
    key = "model.layers.1.self_attn.normalizer.logit"
    return rewritten(folder, lambda weights: weights[key].fill_(1.5))


@pytest.mark.parametrize("to", ["gated", "sink"])
def test_trained_sinks_are_neither_calibrated_nor_set(to, granite, text, tmp_path, capsys):
    made = tmp_path / "made"
    words = ("convert", granite, made, *SHORT, "--to", to)
    said = refusal(capsys, *words, "--calibrate", text)
    assert "a model keeps its own" in said
    assert "a model keeps its own" in refusal(capsys, *words, "--sink-logit", 0)
    said = refusal(capsys, *words[:3], "--prefix", "a", *SHORT)
    assert "is for normalizer='softmax', not 'sink'" in said
    said = refusal(capsys, *words, "annealed_start=true")
    assert "annealed_start=true would begin without this model's normalizer='sink'" in said
    assert not made.exists()
    assert call(*words, "--text", text) == 0
    theirs, ours = map(AutoModelForCausalLM.from_pretrained, (granite, made))
    for before, after in zip(theirs.model.layers, ours.model.layers, strict=True):
        assert torch.equal(before.self_attn.sinks, after.self_attn.normalizer.logit)


def test_calibration_is_refused_where_weights_are_differences(tokenizer, text, tmp_path, capsys):
    source, made = saved(tmp_path / "source", tokenizer, maps="differential"), tmp_path / "made"
    said = refusal(capsys, "convert", source, made, "--to", "sink", "--calibrate", text, *SHORT)
    assert "--calibrate is not for maps='differential'" in said
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
