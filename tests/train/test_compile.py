import shutil
from functools import partialmethod

import pytest
import torch
from torch._dynamo.utils import counters

from clearhead import preset
from clearhead.errors import ClearheadError
from clearhead.models.inspection import decoder_layers
from clearhead.nn import REGISTRY
from clearhead.train import train
from clearhead.train.compiling import compiled


def test_the_decoder_layers_are_found_in_any_model(tiny):
    model = tiny.make_model()
    assert decoder_layers(model) == list(model.model.layers)
    with (
        pytest.raises(ClearheadError, match=r"Linear has no list .* train it with compile none"),
        compiled(torch.nn.Linear(2, 2), "blocks"),
    ):
        pass


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_blocks_train_alike_and_keep_their_names(tiny, tmp_path):
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
    compile_ = partialmethod(torch.nn.Module.compile, backend="eager")  # graphs are what is counted
    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    torch.compiler.reset()
    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(recompile_limit=1):
        for made, layer in enumerate(({}, {"num_key_value_heads": 1}), start=1):
            model = tiny.make_model(hidden_size=16, num_hidden_layers=1, **layer)
            with compiled(model, "blocks"):
                model(torch.zeros(1, 4, dtype=torch.int64))
            assert counters["stats"]["unique_graphs"] == before + made
        assert torch._dynamo.config.recompile_limit == 1
    torch.compiler.reset()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_compiled_relu_keeps_no_signs():
    layer = preset("transformer", hidden_size=16, num_attention_heads=2, mlp="relu").layer(0)
    mlp = REGISTRY.find("mlp", "relu").build(layer, torch.nn.Identity())
    x_BTC = torch.randn(2, 5, 16, requires_grad=True)
    kept: list[torch.dtype] = []

    def keep(tensor):
        kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        got = torch.compile(mlp)(x_BTC)
    assert set(kept) == {torch.float32}  # a mask is stored one number at a time on a CPU
    up, down = mlp.up_proj.weight, mlp.down_proj.weight
    want = (x_BTC @ up.T).clamp(min=0) @ down.T
    torch.testing.assert_close(got, want)
    seed = torch.randn_like(want)
    leaves = (x_BTC, up, down)
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves, seed), torch.autograd.grad(want, leaves, seed), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
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


def test_none_compiles_nothing(tiny):
    model = tiny.make_model()
    with compiled(model, "none"):
        assert all(layer._compiled_call_impl is None for layer in decoder_layers(model))
