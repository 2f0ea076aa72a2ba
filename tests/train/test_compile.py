"""Compiled blocks, and the parameters that are trained: chosen by name, or adapters beside them."""

from dataclasses import replace
from functools import partialmethod

import pytest
import tests_architectures as architectures
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from clearhead.errors import ClearheadError
from clearhead.models.inspection import decoder_layers
from clearhead.train import train
from clearhead.train.compiling import compiled
from clearhead.train.trainable import choose_parameters


def _backend(monkeypatch, name):
    compile_ = partialmethod(torch.nn.Module.compile, backend=name)
    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    torch.compiler.reset()


def test_compiled_blocks_train_alike_and_keep_their_names(tiny, tmp_path, monkeypatch):
    """By inductor: tests/models/test_compiled.py."""
    _backend(monkeypatch, "aot_eager")
    losses = {}
    for mode in ("none", "blocks"):
        model = tiny.make_model(attention_dropout=0.0, num_hidden_layers=1)
        names = list(model.state_dict())
        config = tiny.make_config(tokens=3 * 32, compile=mode)
        result = train(model, tiny.Batches(), config, output=tmp_path / mode)
        losses[mode] = result.final_loss
        assert list(result.model.state_dict()) == names
        assert all(layer._compiled_call_impl is None for layer in decoder_layers(model))
    assert losses["blocks"] == pytest.approx(losses["none"], rel=1e-4)


def test_every_model_of_a_process_is_compiled(tiny, monkeypatch):
    _backend(monkeypatch, "eager")  # graphs are what is counted
    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(recompile_limit=1):
        for made, layer in enumerate(({}, {"num_key_value_heads": 1}), start=1):
            model = tiny.make_model(hidden_size=16, num_hidden_layers=1, **layer)
            with compiled(model, "blocks"):
                model(torch.zeros(1, 4, dtype=torch.int64))
            assert counters["stats"]["unique_graphs"] == before + made
        assert torch._dynamo.config.recompile_limit == 1
    torch.compiler.reset()


def test_a_broken_compiler_is_one_clear_line(tiny, tmp_path, monkeypatch):
    from torch._inductor import config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch.compiler.reset()
    model = tiny.make_model(hidden_size=16, num_hidden_layers=1)
    config = tiny.make_config(tokens=32, compile="blocks")
    with (
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ClearheadError, match=r"torch\.compile does not work here") as caught,
    ):
        train(model, tiny.Batches(), config, output=tmp_path / "run")
    assert "compile none" in str(caught.value)
    assert "\n" not in str(caught.value)
    torch.compiler.reset()


def _trained(tiny, output, model=None, **settings):
    model = tiny.make_model() if model is None else model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, tiny.Batches(), replace(tiny.make_config(), **settings), output=output)
    return {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}, before


@pytest.mark.parametrize("optimizer", ["adamw", "orthoadam", "muon", "sgd"])
def test_only_what_is_named_changes(tiny, tmp_path, optimizer):
    changed, before = _trained(tiny, tmp_path / "run", optimizer=optimizer, only=("*self_attn*",))
    assert changed == {name for name in before if "self_attn" in name}


def test_what_is_frozen_stays_layer_by_layer(tiny, tmp_path):
    patterns = {"only": ("*.layers.*",), "freeze": ("*.layers.0.*", "*norm*")}
    changed, before = _trained(tiny, tmp_path / "run", **patterns)
    assert changed == {n for n in before if ".layers.1." in n and "norm" not in n}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"only": ("*atn*",)}, r"the pattern '\*atn\*' decides no parameter"),
        ({"only": ("*self_attn*",), "freeze": ("*mlp*",)}, "'[*]mlp[*]' decides no parameter"),
        ({"freeze": ("*",)}, "nothing is left to train"),
        ({"lora": 2, "only": ("*norm*",)}, r"lora trains linear layers, and \*norm\* leaves none"),
        ({"lora": 2, "only": ("*q_proj*", "*embed*")}, r"and \*embed\* leaves none"),
    ],
)
def test_patterns_that_decide_nothing_or_leave_nothing_are_refused(tiny, tmp_path, settings, said):
    with pytest.raises(ClearheadError, match=said):
        _trained(tiny, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


MODELS = {
    "llama": lambda tiny: tiny.make_model(),
    "gpt2": lambda tiny: architectures.make("GPT-2"),
    "ours": lambda tiny: architectures.make("softmax1", annealed_start=True),
}


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_are_trained_alone_and_merged_at_the_end(tiny, tmp_path, kind):
    peft = pytest.importorskip("peft")
    if not architectures.takes_adapters():
        pytest.skip("no PEFT that this transformers takes")
    torch.manual_seed(5)
    model = MODELS[kind](tiny)
    _, before = _trained(tiny, tmp_path / "run", model, lora=2, only=("*attn*",))
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {n for n in before if "attn" in n and n.endswith("weight")}
    for name in changed:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) <= 2
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final").eval()
    ids = tiny.Batches().batch(0)["input_ids"]
    assert torch.equal(final(ids).logits, model(ids).logits)

    adapter = tmp_path / "run/final/adapter"
    files = sorted(path.name for path in adapter.iterdir() if path.suffix != ".md")
    assert "adapter_model.safetensors" in files
    assert not [name for name in files if name.endswith(".bin")]
    start = MODELS[kind](tiny)
    start.load_state_dict(before, strict=False)
    for name, buffer in start.named_buffers():
        buffer.copy_(dict(model.named_buffers())[name])
    beside = peft.PeftModel.from_pretrained(start, adapter).eval()
    assert torch.allclose(beside(input_ids=ids).logits, model(ids).logits, atol=1e-5)
    (shard,) = (tmp_path / "run/checkpoints/step-00000012").glob("shard-*")
    weights = {name for name in load_file(shard) if name.startswith("model/")}
    assert any(".lora_" in name for name in weights)
    assert not weights & {f"model/{name}" for name in before}


def test_parameters_frozen_before_stay_frozen(tiny):
    model = tiny.make_model()
    model.model.embed_tokens.weight.requires_grad_(False)
    choose_parameters(model, tiny.make_config())
    assert not model.model.embed_tokens.weight.requires_grad
    assert model.model.norm.weight.requires_grad
