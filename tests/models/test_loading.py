"""Every weight of a checkpoint is accounted for: none is made up or silently passed over."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

from clearhead import ClearheadForCausalLM, ClearheadForMaskedLM, preset
from clearhead.data.tokenizer import train as train_tokenizer
from clearhead.errors import ClearheadError
from clearhead.models import ClearheadForSequenceClassification, ClearheadModel
from clearhead.models.loading import load, pretrained

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300}
THEIRS = {**SHAPE, "intermediate_size": 48}
GPT2 = transformers.GPT2Config(
    n_embd=32, n_layer=1, n_head=2, vocab_size=300, bos_token_id=0, eos_token_id=1
)


def _ours(**changes: object) -> ClearheadForCausalLM:
    return ClearheadForCausalLM(preset("transformer", **SHAPE, **changes))


def _llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**THEIRS))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["key value head token"] * 30, 290)


@pytest.fixture
def save(tmp_path: Path, tokenizer) -> Callable[..., Path]:
    def saved(model) -> Path:
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return saved


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _configure(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}))


def _without(part: str) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        found = [key for key in weights if part in key]
        assert found
        for key in found:
            del weights[key]

    return change


def _refusal(folder: Path, *kinds: str) -> str:
    with pytest.raises(ClearheadError) as refused:
        load(str(folder), kinds or ("causal",))
    (line,) = str(refused.value).splitlines()
    assert str(folder) in line
    return line


@pytest.mark.parametrize(
    ("model", "changes", "missing", "said"),
    [
        (_ours, {}, "layers.1.", "lacks 9 weights (model.layers.1."),
        (_llama, {}, "layers.1.", "lacks 9 weights (model.layers.1."),
        (_ours, {}, "model.norm.weight", "lacks 1 weight (model.norm.weight"),
        (_ours, {}, "model.embed_tokens.weight", "lacks "),
        (_ours, {"num_hidden_layers": 3}, None, "lacks 9 weights (model.layers.2."),
        (_ours, {"num_hidden_layers": 1}, None, "has 9 weights (model.layers.1."),
        (_ours, {"vocab_size": 301}, None, "embed_tokens.weight is (300, 32), not (301, 32)"),
        (  # the reason below a heading of transformers
            *(_llama, {"num_attention_heads": 5}, None),
            "The hidden size (32) is not a multiple of the number of attention heads (5)",
        ),
        (lambda: LlamaModel(LlamaConfig(**THEIRS)), {}, None, "lacks 1 weight (lm_head.weight)"),
    ],
)
def test_weights_that_are_not_those_of_the_configuration_are_refused(
    model, changes, missing, said, save, capfd
):
    folder = save(model())
    _configure(folder, **changes)
    if missing is not None:
        _rewrite(folder, _without(missing))
    assert said in _refusal(folder)
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_an_adapter_is_refused_unread(save):
    peft = pytest.importorskip("peft")
    model = _ours()
    folder = save(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    adapted.save_pretrained(folder)
    assert "has an adapter: merge it by PEFT's merge_and_unload()" in _refusal(folder)


def test_left_over_weights_of_another_library_are_said_in_one_line(save, capsys):
    folder = save(_llama())
    _rewrite(folder, lambda weights: weights.update({"extra\x1b[2J": torch.ones(2)}))
    load(str(folder))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not used" in line]
    assert r"1 weight (extra\x1b[2J) not used" in line


@pytest.mark.parametrize(
    ("model", "trunk"),
    [
        (lambda: ClearheadForSequenceClassification(preset("bert", **SHAPE)), "ClearheadModel"),
        (
            lambda: transformers.BertForTokenClassification(transformers.BertConfig(**THEIRS)),
            "BertModel",
        ),  # has no pooler
        (
            lambda: transformers.BertModel(
                transformers.BertConfig(**THEIRS), add_pooling_layer=False
            ),
            "BertModel",
        ),
        (lambda: ClearheadModel(preset("transformer", **SHAPE)), "ClearheadModel"),
    ],
)
def test_a_trunk_opens_without_the_head(model, trunk, save, capsys):
    folder = save(model())
    opened, _ = load(str(folder), ("causal", "masked", "bare"))
    assert type(opened).__name__ == trunk
    assert "not used" not in capsys.readouterr().err
    _rewrite(folder, _without(".1.") if "Bert" in trunk else _without("layers.1."))
    assert "lacks " in _refusal(folder, "causal", "masked", "bare")


@pytest.mark.parametrize(
    "model",
    [
        _ours,
        lambda: ClearheadForMaskedLM(preset("bert", **SHAPE, tie_word_embeddings=False)),
        lambda: ClearheadModel(preset("transformer", **SHAPE)),
        lambda: ClearheadForSequenceClassification(preset("bert", **SHAPE)),
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**THEIRS)),
        _llama,
        lambda: transformers.GPT2Model(GPT2),
    ],
)
def test_a_classifier_takes_any_trunk_but_a_whole_one(model, save, capsys):
    folder = save(model())
    opened = pretrained(AutoModelForSequenceClassification, folder, head="new", num_labels=5)
    assert opened.config.num_labels == 5
    assert "not used" not in capsys.readouterr().err
    weights = load_file(folder / "model.safetensors")
    if isinstance(opened, ClearheadForSequenceClassification):
        saved = {name.removeprefix("model."): weight for name, weight in weights.items()}
        trunk = opened.model.state_dict()
        assert all(torch.equal(saved[name], weight) for name, weight in trunk.items())
        dense = opened.classifier.dense  # new or saved, and not left as it was found in memory
        assert dense.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert not dense.bias.any()
    _rewrite(folder, _without(max(key for key in weights if ".0." in key or ".1." in key)))
    with pytest.raises(ClearheadError, match="lacks 1 weight "):
        pretrained(AutoModelForSequenceClassification, folder, head="new", num_labels=5)


def test_a_classifier_with_part_of_its_head_or_a_trunk_of_another_size_is_refused(save):
    folder = save(ClearheadForSequenceClassification(preset("bert", **SHAPE)))
    _rewrite(folder, _without("classifier.dense.bias"))
    with pytest.raises(ClearheadError, match=r"lacks 1 weight \(classifier.dense.bias\)"):
        pretrained(AutoModelForSequenceClassification, folder, head="new")
    folder = save(_ours())
    _configure(folder, intermediate_size=64)
    with pytest.raises(ClearheadError, match="other sizes than its config"):
        pretrained(AutoModelForSequenceClassification, folder, head="new")


@pytest.mark.parametrize("name", ["runs/trian", "./smol", "a/b/c"])
def test_a_mistyped_path_is_refused_before_any_network_is_tried(name, tmp_path, monkeypatch):
    (tmp_path / "runs/train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClearheadError) as refused:
        load(name)
    assert f"cannot load a model from '{name}' (no such folder): give a" in str(refused.value)


def test_a_run_that_is_not_finished_is_no_model(tmp_path):
    tmp_path.joinpath("run.json").write_text("{}")
    with pytest.raises(ClearheadError, match="is not finished: go on by clearhead train --resume"):
        load(str(tmp_path))
