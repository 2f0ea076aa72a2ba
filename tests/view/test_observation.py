"""The maps and numbers of a page are those of the model, within a step of packing."""

import json

import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from clearhead.errors import ClearheadError
from clearhead.view import observe_text

from . import conftest as helpers

LAYERS = helpers.LAYERS


def _ids(found, tokenizer, text):
    return torch.tensor([[tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]])


def _own(model, ids):
    """The attention matrices and the logits of the model itself, in eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(ids, output_attentions=True, output_hidden_states=True)
    model.set_attn_implementation(before)
    return out


def _assert_close(found, layer, head, name, own):
    """Each packed weight within a step of the model's own; returns the null key's weights."""
    weights, null = helpers.map_of(found, layer, head, name)
    assert bool(((weights - own).abs() <= helpers.step(found, layer, head, name, own)).all())
    return weights, null


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "transformer", "softmax1"])
def test_maps_are_those_of_eager_attention(make, tokenizer, words, name):
    model = make(name)
    found = observe_text(model, tokenizer, words, name=name)
    out = _own(model, _ids(found, tokenizer, words))
    assert len(found.model["maps"]) == LAYERS * 4
    assert found.model["causal"]
    for layer in range(LAYERS):
        for head in range(4):
            own = out.attentions[layer][0, head].double()
            _, null = _assert_close(found, layer, head, "softmax", own)
            assert (null is not None) == (name == "softmax1")
            if null is not None:
                beside = 1 - own.sum(-1)
                bound = helpers.step(found, layer, head, "softmax", beside)
                assert bool(((null - beside).abs() <= bound).all())
                mean = found.model["statistics"]["null_mass"]["softmax"][layer][head]
                assert mean == pytest.approx(beside.mean().item(), abs=1e-5)
            first = (own[:, 0] == own.amax(-1)).double()
            share = found.model["statistics"]["first_token_share"]["softmax"][layer][head]
            assert share == pytest.approx(first.mean().item(), abs=1e-5)


@pytest.mark.parametrize("name", ["differential", "differential-v2"])
def test_a_differential_head_has_both_maps_their_difference_and_lambda(
    make, tokenizer, words, name
):
    model = make(name)
    found = observe_text(model, tokenizer, words, name=name)
    out = _own(model, _ids(found, tokenizer, words))
    assert found.model["names"] == [["map 1", "map 2", "difference"]] * LAYERS
    heads = len(found.model["statistics"]["first_token_share"]["map 1"][0])
    for layer in range(LAYERS):
        for head in range(heads):
            own = out.attentions[layer][0, head].double()
            signed, _ = _assert_close(found, layer, head, "difference", own)
            assert bool((signed < 0).any())
            parts = ("map 1", "map 2")
            first, second = (helpers.map_of(found, layer, head, part)[0] for part in parts)
            of = found.model["lambdas"][layer]
            lam = torch.tensor(of if isinstance(of, float) else of[head]).reshape(-1, 1)
            maps = zip(parts, (first, second), strict=True)
            loose = sum(helpers.step(found, layer, head, part, one) for part, one in maps)
            assert bool(((first - lam * second - own).abs() <= 2 * loose + 1e-3).all())
            share = found.model["statistics"]["negative_share"]["difference"][layer][head]
            expected = own.clamp(max=0).sum().neg() / own.abs().sum()
            assert share == pytest.approx(expected.item(), abs=1e-4)
    assert list(found.model["statistics"]["entropy"]) == ["map 1", "map 2"]


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "differential"])
def test_surprise_predictions_and_hidden_states_are_the_models_own(make, tokenizer, words, name):
    model = make(name)
    found = observe_text(model, tokenizer, words, name=name).model
    ids = _ids(found, tokenizer, words)
    out = _own(model, ids)
    length, rows = ids.shape[1], LAYERS + 1
    bits = -out.logits[0, :-1].double().log_softmax(-1) / np.log(2)
    expected = bits.gather(-1, ids[0, 1:, None])[:, 0]
    assert found["surprise"][0] is None
    assert found["surprise"][1:] == pytest.approx(expected.tolist(), abs=2e-3)
    lens = found["lens"]
    tokens = helpers.unpacked(lens["tokens"], "<u4").reshape(rows, length, lens["best"])
    best = out.logits[0].argmax(-1).tolist()
    words_of = [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in best]
    assert [lens["strings"][i] for i in tokens[-1, :, 0]] == words_of
    norms = helpers.unpacked(found["hidden"]["norms"], "<f4").reshape(rows, length)
    # transformers' last hidden state has been normed; those before it are the stream.
    own = torch.stack([x[0].norm(dim=-1) for x in out.hidden_states[:-1]])
    assert norms[:-1] == pytest.approx(own.numpy(), rel=1e-3)
    channels = helpers.unpacked(found["hidden"]["channels"], "<u4").reshape(rows, length)
    assert channels[1].tolist() == out.hidden_states[1][0].abs().argmax(-1).tolist()


def test_a_lens_that_is_not_the_models_own_is_left_out(make, tokenizer, words):
    """Half of the logits is another prediction than the norm and the head make."""
    model = make("Llama")
    model.register_forward_hook(lambda module, _, out: setattr(out, "logits", out.logits / 2))
    found = observe_text(model, tokenizer, words, name="x").model
    assert "lens" not in found
    assert "surprise" in found


def test_tokens_have_their_characters_and_places(make, tokenizer):
    text = "the 😀 cat\n"
    found = observe_text(make("Llama"), tokenizer, text, name="x").model
    assert found["tokens"][0] == "<|begin|>"
    assert "".join(found["tokens"][1:]) == text
    assert all(0 <= start <= stop <= len(text) for start, stop in found["spans"])
    assert found["total"] == len(found["tokens"]) == len(found["spans"])
    cut = observe_text(make("Llama"), tokenizer, text * 9, name="x", longest=20).model
    assert len(cut["tokens"]) == 20 < cut["total"]
    assert len(cut["maps"]) == LAYERS * 4


def test_an_encoder_reads_both_ways_and_predicts_nothing(make, tokenizer, words):
    model = make("BERT")
    found = observe_text(model, tokenizer, words, name="x")
    assert not found.model["causal"]
    assert not {"lens", "surprise"} & set(found.model)
    out = _own(model, _ids(found, tokenizer, words))
    for layer in range(3):
        _assert_close(found, layer, 2, "softmax", out.attentions[layer][0, 2].double())


def test_texts_and_models_that_cannot_be_viewed_are_refused(make, tokenizer, words):
    bloom = BloomForCausalLM(BloomConfig(hidden_size=24, n_layer=1, n_head=2, vocab_size=300))
    mamba = make("Mamba").to(torch.bfloat16)  # its stream stays float32
    for model, text, message in (
        (make("Llama"), "", "the text is 1 token for x: give at least 2"),
        (make("GPT-2"), words * 9, r"64 learned positions.*give --tokens 64"),
        (mamba, words, "x has no attention in its layers"),
        (bloom.eval(), words, "its attention cannot be observed"),
    ):
        with pytest.raises(ClearheadError, match=message):
            observe_text(model, tokenizer, text, name="x")


@pytest.mark.parametrize("layer", [0, 1])
def test_numbers_that_are_not_finite_are_left_out_and_said(make, tokenizer, words, layer):
    model = make("transformer")
    with torch.no_grad():
        next(model.model.layers[layer].parameters()).fill_(torch.nan)
    found = observe_text(model, tokenizer, words, name="a")
    assert found.lost == found.model["lost"] == f"after layer {layer}"
    json.dumps(found.model, allow_nan=False)
    assert found.model["surprise"][1:] == [None] * (len(found.model["tokens"]) - 1)
