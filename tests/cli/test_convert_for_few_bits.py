"""clearhead convert: prefixes and rotations, which make few bits cheap."""

import json
import operator
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    MistralConfig,
    MistralForCausalLM,
)

from clearhead.experiments import converting
from clearhead.experiments.calibration import sample
from clearhead.models import rotated

from .conftest import call, error_line, refusal


def test_a_prefix_and_a_rotation_are_in_the_model_itself(llama, text, tmp_path, capsys):
    made = tmp_path / "made"
    words = ("--prefix", r"\n", "--rotate", "down", "--length", "24", "--windows", "2")
    assert call("convert", str(llama), str(made), *words) == 0
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
    assert call("generate", str(made), "attention", "--tokens", "4") == 0
    data = ("--data.data", str(text), "--data.validation", "0.5")
    words = ("--scheme", "w8a8-coarse", "logits8-row", "--length", "16", "--tokens", "32", *data)
    assert call("quantize", str(made), *words, "--records", str(tmp_path / "records.jsonl")) == 0
    lines = (tmp_path / "records.jsonl").read_text("utf-8").splitlines()
    assert next(map(json.loads, lines))["left_out"] == {}
    assert call("convert", str(made), str(tmp_path / "llama")) == 2
    assert "Llama has no normalizer='key-value'" in error_line(capsys)


def test_a_prefix_beside_another_function_names_the_way_to_both(llama, tmp_path, capsys):
    made, both = tmp_path / "made", tmp_path / "both"
    words = ("--to", "xsa", "--length", "24", "--windows", "2")
    said = refusal(capsys, "convert", llama, both, "--prefix", "a", *words)
    assert "convert --to a mechanism of another function first" in said
    assert call("convert", llama, made, *words) == 0
    assert call("convert", made, both, "--prefix", "a", "--length", "24", "--windows", "2") == 0
    capsys.readouterr()
    words = ("--prefix", "a", "--to", "gated", "--length", "24", "--windows", "2")
    assert call("convert", llama, tmp_path / "gated", *words) == 0


def test_a_prefix_says_that_it_is_seen_beyond_a_sliding_window(llama, tmp_path, capsys):
    sliding, made = tmp_path / "sliding", tmp_path / "made"
    config = AutoConfig.from_pretrained(llama).to_dict()
    for key in ("model_type", "architectures"):
        config.pop(key)
    model = MistralForCausalLM(MistralConfig(**config | {"sliding_window": 8}))
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(llama).state_dict())
    model.save_pretrained(sliding)
    AutoTokenizer.from_pretrained(llama).save_pretrained(sliding)
    assert call("convert", str(sliding), str(made), "--prefix", "a", "--length", "24") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "within the sliding window of 8 tokens; beyond it every token still sees" in said
    ours, theirs = map(AutoModelForCausalLM.from_pretrained, (made, sliding))
    (token,) = json.loads((made / "conversion.json").read_text("utf-8"))["prefix"]["ids"]
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        wanted = theirs(torch.cat([torch.tensor([[token]]), tokens], 1)).logits[:, 1:]
        apart = (ours(tokens).logits - wanted).abs().amax(-1)[0]
    assert apart[:7].max() < 1e-4
    assert apart[7:].min() > 1e-3


def test_a_rotation_of_the_weights_alone_goes_back_to_transformers(llama, tmp_path, capsys):
    made, back = tmp_path / "made", tmp_path / "back"
    assert call("convert", str(llama), str(made), "--rotate", "residual", "values") == 0
    assert "with equal logits" in capsys.readouterr().out
    record = json.loads((made / "conversion.json").read_text("utf-8"))
    assert (record["rotated"], record["seed"]) == (["residual", "values"], 0)
    other = tmp_path / "other"
    words = ("--rotate", "residual", "values", "--seed", "3")
    assert call("convert", str(llama), str(other), *words) == 0
    assert json.loads((other / "conversion.json").read_text("utf-8"))["seed"] == 3
    weights = [load_file(one / "model.safetensors") for one in (made, other)]
    name = "model.embed_tokens.weight"
    assert not torch.allclose(weights[0][name], weights[1][name])
    assert call("convert", str(made), str(back)) == 0
    theirs, again = map(AutoModelForCausalLM.from_pretrained, (llama, back))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(again(tokens).logits, theirs(tokens).logits, atol=1e-4)
    assert bool((again.model.norm.weight == 1).all())


def test_equal_rows_go_back_to_transformers_and_come_after_a_prefix_too(llama, tmp_path, capsys):
    made, prefixed, back = tmp_path / "made", tmp_path / "prefixed", tmp_path / "back"
    assert call("convert", str(llama), str(made), "--rotate", "down", "--equalise") == 0
    assert "with equal logits" in capsys.readouterr().out
    record = json.loads((made / "conversion.json").read_text("utf-8"))
    assert (record["equalised"], record["seed"]) == (True, None)
    plain = ("--to", "mlp_rotation=none")
    assert call("convert", str(made), str(tmp_path / "plain"), *plain) == 0
    assert call("convert", str(tmp_path / "plain"), str(back)) == 0
    theirs, again = map(AutoModelForCausalLM.from_pretrained, (llama, back))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(again(tokens).logits, theirs(tokens).logits, atol=1e-4)
    assert not torch.allclose(
        again.model.layers[0].mlp.up_proj.weight, theirs.model.layers[0].mlp.up_proj.weight
    )
    words = ("--prefix", r"\n", "--rotate", "residual", "down", "--learn-rotation")
    assert call("convert", str(llama), str(prefixed), *words) == 0
    record = json.loads((prefixed / "conversion.json").read_text("utf-8"))
    assert (record["learned_rotation"], record["equalised"]) == (True, False)
    both = tmp_path / "both"
    assert call("convert", str(prefixed), str(both), "--equalise") == 0
    assert "with equal logits" in capsys.readouterr().out.splitlines()[-1]
    for layer in AutoModelForCausalLM.from_pretrained(both).model.layers:
        sizes = layer.mlp.up_proj.weight.abs().amax(1)
        torch.testing.assert_close(sizes, sizes.median().expand_as(sizes), rtol=1e-5, atol=0)
    record = json.loads((both / "conversion.json").read_text("utf-8"))
    assert record["prefix"] is None


def test_a_learned_rotation_makes_the_largest_weights_smaller(llama, tmp_path):
    long, folders = tmp_path / "long", (tmp_path / "random", tmp_path / "learned")
    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3].mul_(8)
    model.save_pretrained(long)
    AutoTokenizer.from_pretrained(llama).save_pretrained(long)
    for folder, option in zip(folders, ((), ("--learn-rotation",)), strict=True):
        assert call("convert", str(long), str(folder), "--rotate", "residual", *option) == 0
    name = "model.layers.0.self_attn.q_proj.weight"
    weights = [load_file(folder / "model.safetensors")[name] for folder in folders]
    random, learned = (float(weight.abs().max()) for weight in weights)
    assert learned < 0.9 * random


def test_a_searched_prefix_is_the_best_of_those_at_no_loss(llama, text, tmp_path, capsys):
    made, loud, still = tmp_path / "made", tmp_path / "loud", tmp_path / "still"
    words = ("--prefix", "auto", "--calibrate", str(text), "--length", "24", "--windows", "2")
    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()  # no token changes another's state
    model.save_pretrained(still)
    AutoTokenizer.from_pretrained(llama).save_pretrained(still)
    assert call("convert", str(still), str(made), *words) == 2
    assert "without raising perplexity: give one" in error_line(capsys)
    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-3)  # no prefix changes much of the loss
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(20)  # a token that sees itself alone is loud
    model.save_pretrained(loud)
    AutoTokenizer.from_pretrained(llama).save_pretrained(loud)
    assert call("convert", str(loud), str(made), *words) == 0
    prefix = json.loads((made / "conversion.json").read_text("utf-8"))["prefix"]
    plain, *others = prefix["tried"]
    assert plain["tokens"] == []
    (chosen,) = [one for one in others if one["tokens"] == prefix["ids"]]
    found = [plain, *(one for one in others if one["tokens"] == prefix["ids"][:-1])][-1]
    limit = 1.01 * min(plain["perplexity"], found["perplexity"])
    assert chosen["perplexity"] <= limit
    alike = [one for one in others if len(one["tokens"]) == len(prefix["ids"])]
    rank = operator.itemgetter("fails", "largest")
    assert len(alike) > 5
    assert all(one["perplexity"] > limit for one in alike if rank(one) < rank(chosen))
    assert chosen["largest"] < plain["largest"]
    assert chosen["fails"] <= plain["fails"] <= plain["pieces"]
    assert "largest hidden state" in capsys.readouterr().err
    # What is searched is the model as it was given, whatever is turned beside it.
    turned = tmp_path / "turned"
    assert call("convert", str(loud), str(turned), *words, "--rotate", "residual", "down") == 0
    assert (
        json.loads((turned / "conversion.json").read_text("utf-8"))["prefix"]["tried"]
        == prefix["tried"]
    )


def test_what_is_refused_is_refused_before_the_search_and_the_rotation(
    llama, text, tmp_path, capsys, monkeypatch
):
    """Both take minutes on a model of any size."""
    source, made = tmp_path / "source", tmp_path / "made"
    shutil.copytree(llama, source)
    for module, name in ((rotated, "learned_rotation"), (converting, "searched_prefix")):
        monkeypatch.delattr(module, name)
    turned = ("--rotate", "residual", "--learn-rotation")
    read = ("--calibrate", str(text), "--length", "16")
    for words, said in (
        (("--to", "sink", "--prefix", "a"), "--to asks for 'sink': give one"),
        (("--prefix", "attention " * 70), "tokens: give 1 to 64"),
        (("--prefix", "zq" * 32), "leaves no room for a text within 64 positions"),
        (("--prefix", "auto", "--equalise", *read), "give --rotate down too"),
        (("--prefix", "auto"), "give --calibrate TEXT"),
        (("--sink-logit", "0"), "a model keeps its own"),
        (("--to", "xsa", *read), "stay as they are: give --to sink"),
        (("--to", "key-value", "prefix_length=16", *read), "give --length 17 or more"),
        (("--to", "maps=differential"), "num_attention_heads=9 is odd"),
    ):
        assert call("convert", str(source), str(made), *words, *turned) == 2
        assert said in error_line(capsys)
    assert call("convert", str(llama), str(tmp_path / "normed"), "--to", "norm=layernorm") == 0
    words = ("--prefix", "auto", "--rotate", "residual", *read)
    assert call("convert", str(tmp_path / "normed"), str(made), *words) == 2
    assert "norm='layernorm' treats each channel by itself" in error_line(capsys)
    assert not made.exists()


@pytest.mark.parametrize("count", [1, 3])
def test_learned_keys_and_values_are_the_mean_of_first_tokens(count, llama, text, tmp_path, capsys):
    made = tmp_path / "made"
    words = ("--calibrate", str(text), "--length", "24", "--windows", "4")
    to = ("--to", "key-value", f"prefix_length={count}")
    assert call("convert", str(llama), str(made), *to, *words) == 0
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
    assert call("convert", str(llama), str(prefixed), "--prefix", r"\n attention") == 0
    words = ("--calibrate", str(text), "--length", "24", "--windows", "2")
    for to in ("mlp_rotation=hadamard", "key-value"):
        assert call("convert", str(prefixed), str(made), "--to", to, *words) == 2
        said = error_line(capsys)
        assert "--calibrate would replace the keys and values that this model has" in said
        assert not made.exists()
    words = ("--text", str(text), "--length", "24", "--windows", "2")
    assert call("convert", str(prefixed), str(made), "--to", "mlp_rotation=hadamard", *words) == 0
    weights = [load_file(one / "model.safetensors") for one in (prefixed, made)]
    name = "model.layers.0.self_attn.normalizer.key_bias"
    assert torch.equal(weights[0][name], weights[1][name])
