"""clearhead convert: prefixes and rotations, which make few bits cheap."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests_architectures import takes_adapters
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from clearhead.lab import prefixes
from clearhead.lab.prefixes import sample
from clearhead.models import rotated

from .conftest import call, lines_of, refusal, rewritten, saved_llama


def test_a_prefix_and_a_rotation_are_in_the_model_itself(llama, text, tmp_path, capsys):
    made = tmp_path / "made"
    words = ("--prefix", r"\n", "--rotate", "down", "--length", "24", "--windows", "2")
    assert call("convert", llama, made, *words) == 0
    assert "logits are those of the first model after it" in capsys.readouterr().out
    record = json.loads((made / "conversion.json").read_text("utf-8"))
    ids = record["prefix"]["ids"]
    ours, theirs = map(AutoModelForCausalLM.from_pretrained, (made, llama))
    assert ours.config.prefix_length == len(ids)
    assert ours.config.mlp_rotation == "hadamard"
    assert AutoTokenizer.from_pretrained(made).decode(ids) == record["prefix"]["text"] == "\n"
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        wanted = theirs(torch.cat([torch.tensor([ids]), tokens], 1)).logits[:, len(ids) :]
        assert torch.allclose(ours(tokens).logits, wanted, atol=1e-4)
    assert call("generate", made, "attention", "--tokens", "4") == 0
    data = ("--data.data", str(text), "--data.validation", "0.5")
    words = ("--scheme", "w8a8-coarse", "logits8-row", "--length", "16", "--tokens", "32", *data)
    assert call("quantize", made, *words, "--records", tmp_path / "records.jsonl") == 0
    lines = (tmp_path / "records.jsonl").read_text("utf-8").splitlines()
    assert next(map(json.loads, lines))["left_out"] == {}
    said = refusal(capsys, "convert", made, tmp_path / "llama")
    assert "Llama has no normalizer='key-value'" in said


def test_a_prefix_beside_another_function_names_the_way_to_both(llama, tmp_path, capsys):
    made, both = tmp_path / "made", tmp_path / "both"
    words = ("--to", "xsa", "--length", "24", "--windows", "2")
    said = refusal(capsys, "convert", llama, both, "--prefix", "a", *words)
    assert "convert --to a mechanism of another function first" in said
    assert call("convert", llama, made, *words) == 0
    prefix = ("--prefix", "a", *words[2:])
    assert call("convert", made, both, *prefix) == 0
    assert call("convert", llama, tmp_path / "gated", "--to", "gated", *prefix) == 0


def test_a_rotation_of_the_weights_alone_goes_back_to_transformers(llama, tmp_path, capsys):
    made, back = tmp_path / "made", tmp_path / "back"
    assert call("convert", llama, made, "--rotate", "residual", "values") == 0
    assert "with equal logits" in capsys.readouterr().out
    other = tmp_path / "other"
    assert call("convert", llama, other, "--rotate", "residual", "values", "--seed", "3") == 0
    records = [json.loads((one / "conversion.json").read_text("utf-8")) for one in (made, other)]
    assert [one["rotated"] for one in records] == [["residual", "values"]] * 2
    assert [one["seed"] for one in records] == [0, 3]
    weights = [load_file(one / "model.safetensors") for one in (made, other)]
    name = "model.embed_tokens.weight"
    assert not torch.allclose(weights[0][name], weights[1][name])
    assert call("convert", made, back) == 0
    theirs, again = map(AutoModelForCausalLM.from_pretrained, (llama, back))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(again(tokens).logits, theirs(tokens).logits, atol=1e-4)
    assert bool((again.model.norm.weight == 1).all())


def test_equal_rows_and_a_learned_rotation_come_after_a_prefix_too(llama, tmp_path, capsys):
    prefixed, both = tmp_path / "prefixed", tmp_path / "both"
    words = ("--prefix", r"\n", "--rotate", "residual", "down", "--learn-rotation")
    assert call("convert", llama, prefixed, *words) == 0
    assert call("convert", prefixed, both, "--equalise") == 0
    assert "with equal logits" in capsys.readouterr().out.splitlines()[-1]
    for layer in AutoModelForCausalLM.from_pretrained(both).model.layers:
        sizes = layer.mlp.up_proj.weight.abs().amax(1)
        torch.testing.assert_close(sizes, sizes.median().expand_as(sizes), rtol=1e-5, atol=0)
    before, after = (json.loads((one / "conversion.json").read_text()) for one in (prefixed, both))
    assert (before["learned_rotation"], before["equalised"]) == (True, False)
    assert (after["equalised"], after["seed"], after["prefix"]) == (True, None, None)


def test_a_searched_prefix_is_that_of_the_model_as_it_was_given(llama, text, tmp_path, capsys):
    """Whatever is turned beside it; which prefix is chosen: tests/models/test_prefix.py."""
    words = ("--prefix", "auto", "--calibrate", str(text), "--length", "24", "--windows", "2")

    def scaled(source: Path, name: str, factors: dict[str, float]) -> Path:
        folder = shutil.copytree(source, tmp_path / name)
        parts = factors.items()
        return rewritten(folder, lambda w: [w[k].mul_(f) for p, f in parts for k in w if p in k])

    # No prefix changes much of the loss; and a token that sees itself alone is loud.
    loud = scaled(llama, "loud", {"lm_head": 1e-3, "v_proj": 20})
    still = scaled(loud, "still", {"o_proj": 0})  # no token changes another's state
    said = refusal(capsys, "convert", still, tmp_path / "none", *words)
    assert "without raising perplexity" in said
    tried = []
    for name, more in (("made", ()), ("turned", ("--rotate", "residual", "down"))):
        assert call("convert", loud, tmp_path / name, *words, *more) == 0
        record = json.loads((tmp_path / name / "conversion.json").read_text())["prefix"]
        tried.append(record["tried"])
        assert record["ids"] in [one["tokens"] for one in record["tried"]]
    assert tried[0] == tried[1]
    assert "largest hidden state" in capsys.readouterr().err


def test_what_is_refused_is_refused_before_the_search_and_the_rotation(
    llama, text, tmp_path, capsys, monkeypatch
):
    """Both take minutes on a model of any size."""
    made, short = tmp_path / "made", tmp_path / "short.txt"
    short.write_text("attention noise sink", "utf-8")
    for module, name in ((rotated, "learned_rotation"), (prefixes, "searched_prefix")):
        monkeypatch.delattr(module, name)
    turned, long = ("--rotate", "residual", "--learn-rotation"), ("--length", "64")
    read = ("--calibrate", str(text), "--length", "16")
    said = refusal(capsys, "convert", llama, made, "--rotate", "down", "--learn-rotation")
    assert "no effect without --rotate residual" in said
    for words, said in (
        (("--to", "gated", "sink"), "--to takes one preset"),
        (("--to", "hidden_size=12"), "hidden_size is a size"),
        (("--to", "sink", "--prefix", "a"), "is for normalizer='softmax', not 'sink'"),
        (("--prefix", ""), "the prefix has 0 tokens: give 1 to 64"),
        (("--prefix", "zq" * 32), "leaves no text in 64 positions"),
        (("--prefix", "auto", "--equalise", *read), "give --rotate down too"),
        (("--sink-logit", "0"), "a model keeps its own"),
        (("--to", "xsa", *read), "a model keeps its own"),
        (("--to", "sink", "--calibrate", short, *long), "too few for 2 of 64: give"),
        (("--to", "gated", "--text", short, *long), "too few for 1 of 64: give more text"),
    ):
        assert said in refusal(capsys, "convert", llama, made, *words, *turned)
    assert call("convert", llama, tmp_path / "normed", "--to", "norm=layernorm") == 0
    words = ("--prefix", "auto", "--rotate", "residual", *read)
    said = refusal(capsys, "convert", tmp_path / "normed", made, *words)
    assert "norm='layernorm' treats each channel by itself" in said
    assert not made.exists()


@pytest.mark.parametrize("count", [1, 3])
def test_learned_keys_and_values_are_the_mean_of_first_tokens(count, llama, text, tmp_path, capsys):
    made = tmp_path / "made"
    words = ("--calibrate", str(text), "--length", "24", "--windows", "4")
    to = ("--to", "key-value", f"prefix_length={count}")
    assert call("convert", llama, made, *to, *words) == 0
    assert "keys and values of first tokens" in capsys.readouterr().out
    ours, theirs = map(AutoModelForCausalLM.from_pretrained, (made, llama))
    windows = sample(str(text), AutoTokenizer.from_pretrained(made), length=24, count=8)[::2]
    with torch.no_grad():
        cache = theirs(torch.stack(windows)[:, :count], use_cache=True).past_key_values
    for layer, theirs_ in zip(ours.model.layers, cache.layers, strict=True):
        normalizer = layer.self_attn.normalizer
        assert torch.allclose(normalizer.value_bias, theirs_.values.mean(0), atol=1e-5)
        # At position 0 rotation leaves keys as they are, and elsewhere as long.
        keys = theirs_.keys.mean(0)
        assert torch.allclose(normalizer.key_bias[:, 0], keys[:, 0], atol=1e-5)
        assert torch.allclose(normalizer.key_bias.norm(dim=-1), keys.norm(dim=-1), atol=1e-4)


def test_a_calibration_never_replaces_a_prefix(llama, text, tmp_path, capsys):
    prefixed, made = tmp_path / "prefixed", tmp_path / "made"
    assert call("convert", llama, prefixed, "--prefix", r"\n attention") == 0
    words = ("--calibrate", str(text), "--length", "24", "--windows", "2")
    for to in ("mlp_rotation=hadamard", "key-value"):
        said = refusal(capsys, "convert", prefixed, made, "--to", to, *words)
        assert "--calibrate would replace the keys and values of this model" in said
        assert not made.exists()
    words = ("--text", str(text), "--length", "24", "--windows", "2")
    assert call("convert", prefixed, made, "--to", "mlp_rotation=hadamard", *words) == 0
    weights = [load_file(one / "model.safetensors") for one in (prefixed, made)]
    name = "model.layers.0.self_attn.normalizer.key_bias"
    assert torch.equal(weights[0][name], weights[1][name])


# A model with a prefix, in other verbs

KEYS = "model.layers.0.self_attn.normalizer.key_bias"


@pytest.fixture(scope="module")
def plain(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"intermediate_size": 64, "max_position_embeddings": 512, "initializer_range": 0.3}
    return saved_llama(tmp_path_factory.mktemp("plain"), tokenizer, **shape)


@pytest.fixture(scope="module")
def prefixed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefixed") / "model"
    assert call("convert", plain, folder, "--prefix", "key") == 0
    return folder


def test_a_prefix_is_evaluated_at_every_length_and_in_sliding_windows(prefixed, windows, tmp_path):
    records = str(tmp_path / "records.jsonl")
    tasks = ["--tasks", "perplexity", "passkey", "--lengths", "256", "--passkey.trials", "2"]
    common = [*windows[: windows.index("--data.validation") + 2], "--records", records]
    words = [*tasks, "--tokens", "512", *common]
    assert call("eval", prefixed, *words) == 0
    slid = ["--perplexity.text", "stream", "--perplexity.stride", "32", "--lengths", "64"]
    assert call("eval", prefixed, *slid, "--tokens", "256", *common) == 0
    cells = [line for line in lines_of(tmp_path) if line["kind"] == "cell"]
    assert [(one["task"], one["at"]["length"]) for one in cells if one["task"] == "perplexity"] == [
        ("perplexity", 256),
        ("perplexity", 64),
    ]
    depths = {one["at"]["depth"] for one in cells if one["task"] == "passkey"}
    assert len(depths) > 1


@pytest.mark.parametrize("more", [[], ["--train.lora", "2"], ["--train.document-masks"]])
def test_a_prefix_is_trained_on(prefixed, going_on, more, tmp_path):
    if more[:1] == ["--train.lora"] and not takes_adapters():
        pytest.skip("no PEFT that this transformers takes")
    assert call("train", "--from", prefixed, *more, *going_on, "--output", tmp_path / "run") == 0
    start = load_file(prefixed / "model.safetensors")[KEYS]
    final = load_file(tmp_path / "run/final/model.safetensors")[KEYS]
    assert torch.equal(start, final) == (more[:1] == ["--train.lora"])
