"""The model against transformers' own, its cache against the full forward, its loss by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM

from clearhead import ClearheadError, ClearheadForCausalLM, ClearheadForMaskedLM, preset
from clearhead.models import PRESETS as ALL

from . import space
from .space import WHOLE as SHAPE

PRESETS = [name for name in ALL if preset(name).direction == "causal"]


def _model(name: str, **overrides: object) -> Any:
    # A wide initialisation, so that attention is far from uniform.
    config = preset(name, **SHAPE | overrides)
    kind = ClearheadForCausalLM if config.direction == "causal" else ClearheadForMaskedLM
    model = kind(config)
    space.stir(model)
    return model.eval()


_ids = space.drawing(13, 61)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_transformer_is_llama(groups):
    ours = _model("transformer", num_key_value_heads=groups)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            **SHAPE, num_key_value_heads=groups, tie_word_embeddings=True, rms_norm_eps=1e-5
        )
    ).eval()
    theirs.load_state_dict(ours.state_dict())
    ids = _ids()
    a, b = ours(ids, labels=ids), theirs(ids, labels=ids)
    assert torch.allclose(a.logits, b.logits, atol=2e-5)
    assert torch.allclose(a.loss, b.loss, atol=1e-5)
    ours.train()
    ours(ids, labels=ids).loss.backward()
    b.loss.backward()
    gradients = {name: q.grad for name, q in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        assert torch.allclose(p.grad, gradients[name], atol=2e-5), name


@pytest.mark.parametrize("name", PRESETS)
def test_eager_is_the_oracle_of_sdpa_and_every_parameter_receives_a_gradient(name):
    space.eager_agrees(_model(name).double(), _ids())


DOCUMENTS = torch.tensor([[0] * 6 + [1] * 7])
RESTARTING = torch.tensor([[*range(6), *range(7)]])
# All of these say that a row holds a text of 6 and one of 7 tokens.
PACKINGS = {
    "documents": {"document_ids": DOCUMENTS},
    "documents and positions": {"document_ids": DOCUMENTS, "position_ids": RESTARTING},
    "positions": {"position_ids": RESTARTING},
    "positions and a mask": {"position_ids": RESTARTING, "attention_mask": DOCUMENTS * 0 + 1},
}


@pytest.mark.parametrize("name", ALL)
def test_packed_documents_are_texts_of_their_own_however_they_are_told(name):
    """The same bits in every form, also before padding, and each document as alone."""
    model, first, second = _model(name), _ids(1, 6), _ids(1, 7)
    ids = torch.cat([first, second], 1)
    alone = torch.cat([model(first).logits, model(second).logits], 1)

    def run(inputs: dict[str, Any]) -> list[Tensor]:
        model.zero_grad()
        logits = model(**inputs).logits[:, :13]
        assert torch.allclose(logits, alone, atol=2e-5)
        logits.square().mean().backward()
        return [logits, *(p.grad.clone() for p in model.parameters())]

    padded = [
        {key: pad(x, (0, 3)) for key, x in {"attention_mask": DOCUMENTS * 0 + 1, **form}.items()}
        for form in PACKINGS.values()
    ]
    for row, forms in ((ids, [*PACKINGS.values()]), (pad(ids, (0, 3)), padded)):
        wanted = run({"input_ids": row} | forms[0])
        for form in forms[1:]:
            assert all(map(torch.equal, run({"input_ids": row} | form), wanted)), form


@torch.no_grad()
def test_documents_may_alternate_and_a_row_of_them_be_longer_than_any_text():
    model, ids = _model("gpt2"), _ids(1, 12)
    own = torch.tensor([[0, 1, 0, 0, 1, 2, 1, 0, 2, 2, 1, 0]])
    logits = model(ids, document_ids=own).logits
    for document in range(3):
        alone = model(ids[own == document][None]).logits[0]
        assert torch.allclose(logits[own == document], alone, atol=2e-5)
    model, ids = _model("gpt2", max_position_embeddings=8), _ids(1, 15)
    documents = torch.tensor([[0] * 8 + [1] * 7])
    wanted = torch.cat([model(part).logits for part in ids.split([8, 7], 1)], 1)
    assert torch.allclose(model(ids, document_ids=documents).logits, wanted, atol=2e-5)
    with pytest.raises(ClearheadError, match="position_ids has 9, outside"):
        model(ids, document_ids=torch.tensor([[0] * 10 + [1] * 5]))


def test_loss_counts_tokens_as_asked():
    model, ids = _model("transformer"), _ids()
    labels = ids.clone()
    labels[:, :4] = -100
    out = model(ids, labels=labels)
    logits, target = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    want = torch.nn.functional.cross_entropy(logits, target, ignore_index=-100)
    assert torch.allclose(out.loss, want, atol=1e-5)
    total = model(ids, labels=labels, num_items_in_batch=100).loss
    assert torch.allclose(total, want * (target != -100).sum() / 100, atol=1e-5)
    model.train()
    trained = model(ids, labels=labels)
    assert trained.logits is None
    assert torch.allclose(trained.loss, want, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "heads"), [("transformer", 4), ("differential", 2), ("differential-v2", 4)]
)
def test_output_attentions_are_what_multiplies_the_values(name, heads):
    model, ids = _model(name), _ids()
    with pytest.raises(ClearheadError, match="attn_implementation='eager'"):
        model(ids, output_attentions=True)
    model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True, output_hidden_states=True)
    assert [tuple(a.shape) for a in out.attentions] == [(2, heads, 13, 13)] * 2
    sums = out.attentions[0].sum(-1)
    first = model.model.layers[0]
    x = first.input_layernorm(model.model.embed_tokens(ids))
    lam = first.self_attn.maps.lambdas(x)
    want = torch.tensor(1.0) if lam is None else 1 - lam
    want = want[..., 0] if want.ndim else want
    assert torch.allclose(sums, want.expand_as(sums), atol=1e-5)
    assert len(out.hidden_states) == 3
    assert torch.equal(out.hidden_states[-1] @ model.lm_head.weight.T, out.logits)


def test_initialisation_is_the_stated_policy():
    torch.manual_seed(0)
    model = ClearheadForCausalLM(preset("differential", "tiny"))
    spread = {name: p.std().item() for name, p in model.named_parameters() if p.numel() > 1}
    for name, p in model.named_parameters():
        if "lambda" in name:
            continue
        if "norm" in name:
            assert (p == 1).all(), name
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            assert abs(spread[name] / (0.02 / 8**0.5) - 1) < 0.03, name
        else:
            assert abs(spread[name] / 0.02 - 1) < 0.03, name
    lambdas = torch.cat([p for name, p in model.named_parameters() if "lambda" in name])
    assert abs(lambdas.std() / 0.1 - 1) < 0.15
    inits = [layer.self_attn.maps.lambda_init for layer in model.model.layers]
    assert inits == pytest.approx([0.2, 0.3555, 0.4707, 0.5561], abs=1e-4)
    gpt2 = ClearheadForCausalLM(preset("gpt2", "tiny"))
    assert all((p == 0).all() for name, p in gpt2.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("normalizer", ["sink", "key", "key-value"])
@pytest.mark.parametrize(
    ("maps", "sinks"), [("single", 4), ("differential", 4), ("differential-v2", 8)]
)
def test_what_is_beside_the_keys_starts_as_softmax1_and_learns(maps, sinks, normalizer):
    """A sink by one logit a map."""
    learned, fixed = (
        _model("transformer", maps=maps, normalizer=one) for one in (normalizer, "softmax1")
    )
    learned.load_state_dict(fixed.state_dict(), strict=False)
    ids = _ids()
    torch.testing.assert_close(learned(ids).logits, fixed(ids).logits, rtol=0, atol=1e-5)
    learned.train()
    learned(ids, labels=ids).loss.backward()
    gradients = [p.grad for name, p in learned.named_parameters() if ".normalizer." in name]
    assert all(gradient.any() for gradient in gradients)
    if normalizer == "sink":
        assert [tuple(gradient.shape) for gradient in gradients] == [(sinks,)] * 2
