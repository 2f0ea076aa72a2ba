"""The conventions that transformers tests of its own models, and its flags, on every attention."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, Cache, DynamicCache
from transformers.cache_utils import QuantizedLayer

from clearhead import ClearheadError, ClearheadForCausalLM
from clearhead.models import ClearheadModel

from . import space
from .space import MECHANISMS

_model = space.build
_ids = space.drawing(9, 61)


def _generate(model: ClearheadForCausalLM, ids: Tensor, **options: object) -> Tensor:
    usual = {"max_new_tokens": 5, "pad_token_id": 0, "do_sample": False}
    return model.generate(ids, **usual | {"attention_mask": torch.ones_like(ids)} | options)


def test_the_flags_say_what_holds():
    assert ClearheadForCausalLM._supports_sdpa
    for feature in ("flash_attn", "flex_attn", "attention_backend", "context_parallel"):
        assert not getattr(ClearheadForCausalLM, f"_supports_{feature}"), feature
    layers = {type(layer).__name__ for layer in _model().model.layers}
    assert set(ClearheadForCausalLM._no_split_modules) == layers


@pytest.mark.parametrize("name", ["differential", "differential-v2", "sink"])
def test_what_needs_float32_is_computed_so_in_a_bfloat16_model(name):
    model = _model(name).bfloat16()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    maps = model.model.layers[0].self_attn.maps
    by = maps.lambdas(torch.randn(1, 3, 32).bfloat16())
    assert by is None or by.dtype == torch.float32
    assert model(_ids()).logits.isfinite().all()


@pytest.mark.parametrize(("name", "keys"), MECHANISMS)
def test_shards_the_base_alone_and_back(name, keys, tmp_path):
    model, ids = _model(name, **keys), _ids()
    want = model(ids).logits
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "shards").eval()
    assert torch.equal(again(ids).logits, want)
    base, report = AutoModel.from_pretrained(tmp_path / "shards", output_loading_info=True)
    assert isinstance(base, ClearheadModel)
    assert not any(report.values())
    base.save_pretrained(tmp_path / "base")
    head, report = AutoModelForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(head.eval()(ids).logits, want)
    assert torch.equal(copy.deepcopy(model)(ids).logits, want)


@pytest.mark.parametrize(("name", "keys"), MECHANISMS)
def test_weights_missing_from_a_checkpoint_are_initialised(name, keys, tmp_path):
    """Models are made on the meta device: what `_init_weights` left out would be garbage."""
    model = _model(name, **keys, initializer_range=0.02, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    file = Path(tmp_path, "model.safetensors")
    kept = "model.embed_tokens.weight"
    save_file({kept: load_file(file)[kept]}, file, metadata={"format": "pt"})
    again, report = ClearheadForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {name for name, _ in model.named_parameters()} - {kept}
    fresh = dict(model.named_parameters())
    for key, p in again.named_parameters():
        want = fresh[key]
        if want.std() == 0 or want.numel() == 1:  # gains, biases, sinks
            assert torch.equal(p, want), key
        else:
            assert p.std().item() == pytest.approx(want.std().item(), rel=0.6), key
    with torch.device("meta"):
        empty = ClearheadForCausalLM(model.config)
    assert {p.device.type for p in empty.parameters()} == {"meta"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [70, 50])
def test_another_vocabulary(tied, size, tmp_path):
    model, ids = _model(tie_word_embeddings=tied), _ids() % 50
    with torch.no_grad():
        before = model(ids).logits
    model.resize_token_embeddings(size, mean_resizing=False)
    kept = min(size, 61)
    assert model.config.vocab_size == size
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert torch.allclose(model(ids).logits[..., :kept], before[..., :kept], atol=1e-5)
    assert model(ids + size - 50).logits.shape == (2, 9, size)
    model.save_pretrained(tmp_path)
    again = ClearheadForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)
    model.train()(ids, labels=ids).loss.backward()


@pytest.mark.parametrize(("name", "keys"), MECHANISMS)
def test_embeddings_instead_of_ids(name, keys):
    model, ids = _model(name, **keys), _ids()
    x = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=x).logits, model(ids).logits)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    got = model.generate(inputs_embeds=x, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(got, _generate(model, ids)[:, 9:])


@pytest.mark.parametrize(("name", "keys"), MECHANISMS)
def test_gradient_checkpointing_changes_no_gradient(name, keys):
    model, ids = _model(name, **keys).train(), _ids()
    gradients = []
    for settings in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if settings is not None:
            model.gradient_checkpointing_enable(settings)
            model.enable_input_require_grads()
            assert model.is_gradient_checkpointing
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for checkpointed in gradients[1:]:
        assert all(map(torch.equal, checkpointed, gradients[0]))


def test_what_would_not_hold_is_refused():
    model, ids = _model().train(), _ids()
    model.gradient_checkpointing_enable()
    with pytest.raises(ClearheadError, match="gradient checkpointing runs a layer twice"):
        model(ids, past_key_values=DynamicCache(), labels=ids)
    with pytest.raises(ClearheadError, match="assistant_early_exit is not supported"):
        _generate(_model(), _ids(1), assistant_early_exit=1)
    cache = Cache(layers=[Rounding(residual_length=2) for _ in range(2)])
    _model()(ids, past_key_values=cache)
    with pytest.raises(ClearheadError, match="a quantised cache would round the gates"):
        _model("forget")(ids, past_key_values=cache)


class Rounding(QuantizedLayer):
    """A quantised cache of transformers that needs no package."""

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor.bfloat16()

    def _dequantize(self, q_tensor: Tensor) -> Tensor:
        return q_tensor.float()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": None}, "either input_ids or inputs_embeds"),
        ({"inputs_embeds": torch.ones(2, 9, 32)}, "either input_ids"),
        ({"input_ids": torch.arange(9)}, r"input_ids must be \[batch, tokens\]"),
        ({"input_ids": torch.ones(2, 0).long()}, "at least one token"),  # it would end the process
        ({"input_ids": None, "inputs_embeds": torch.ones(9, 32)}, "inputs_embeds .batch"),
        ({"position_ids": torch.arange(9)}, r"position_ids must .* \[2, 9\]"),
        ({"position_ids": torch.arange(9.0)[None]}, "whole numbers"),
        ({"labels": torch.ones(2, 4).long()}, r"labels must be int64 \[2, 9\]"),
        ({"input_ids": torch.full((2, 9), 61)}, "outside the vocabulary, 0 to 60"),
        ({"input_ids": torch.full((2, 9), -1)}, r"input_ids has -\d+, outside"),
        (
            {"position_ids": torch.arange(9)[None] % 4, "past_key_values": DynamicCache()},
            "begin anew at token 4 of row 0, and packed documents cannot",
        ),
        ({"attention_mask": torch.tensor([[1] * 5 + [2] * 4] * 2)}, "attention_mask must hold 1"),
        ({"document_ids": torch.zeros(2, 5).long()}, "document_ids must be"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, "document_ids"),
        ({"zzz": 1}, "unknown argument .*choose one of .*input_ids"),
        ({"labels": torch.full((2, 9), 61)}, "61 is outside the vocabulary, 0 to 60"),
        ({"labels": torch.full((2, 9), -99)}, "label -99 is outside"),
        ({"labels": torch.full((2, 9), -100)}, "every label is -100"),
        ({"attention_mask": torch.ones(2, 9, 9)}, r"must be \[batch, past"),
        ({"attention_mask": torch.tensor([[1] * 9, [0] * 9])}, "row 1 of attention_mask is all"),
        ({"attention_mask": torch.eye(2, 9) * -1e9}, "hold 1 for a token and 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_one_line(arguments, message):
    with pytest.raises(ClearheadError, match=message) as error:
        _model()(**{"input_ids": torch.arange(18).view(2, 9), **arguments})
    assert "\n" not in str(error.value)


def test_positions_labels_and_documents():
    model, ids, documents = _model(), _ids(), torch.zeros(2, 9, dtype=torch.long)
    model(ids, position_ids=torch.tensor([[*range(4), *range(40, 45)]]))  # a gap begins no text
    assert model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=5).loss == 0
    assert model(ids, document_ids=documents).past_key_values is None
    with pytest.raises(ClearheadError, match="cannot be used with a key-value cache"):
        model(ids, document_ids=documents, past_key_values=DynamicCache())
    model = _model(position="learned")
    with pytest.raises(ClearheadError, match="more than the 64 positions"):
        model(_ids(length=65))
    with pytest.raises(ClearheadError, match="position_ids has 64, outside the positions"):
        model(_ids(length=2), position_ids=torch.tensor([[3, 64]]))
