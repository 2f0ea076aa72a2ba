"""Kurtosis in OrthoAdam's basis, against the definition in float64."""

import pytest
import torch

from clearhead import ClearheadForCausalLM, preset
from clearhead.diagnose import RotatedKurtosis
from clearhead.optim.rotations import make_rotation, random_signs, sign_key
from clearhead.probe import measure


def oracle(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred.pow(4).mean(-1) / centred.pow(2).mean(-1).square()


@pytest.mark.parametrize("share", ["parameter", "size"])
@pytest.mark.parametrize("kind", ["hadamard", "haar"])
def test_it_is_the_kurtosis_of_the_states_in_the_embeddings_basis(kind: str, share: str) -> None:
    torch.manual_seed(0)
    config = preset("transformer", hidden_size=36, num_attention_heads=2, num_hidden_layers=2)
    model = ClearheadForCausalLM(config).train()
    texts = [torch.randint(0, config.vocab_size, (7,)) for _ in range(3)]
    rotated = RotatedKurtosis(model, kind=kind, seed=3, share=share)
    found = measure(model, texts, batch_size=2, hidden=[rotated])
    assert model.training
    matrix = make_rotation(kind, seed=3, size=36).apply(torch.eye(36)).mT.double()
    if share == "parameter":
        key = sign_key(3, "model.embed_tokens.weight", -1)
        matrix = matrix * random_signs([key], 36, torch.device("cpu"))
    assert {line["rotation_share"] for line in found} == {share}

    states: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(
            lambda m, a, out: states.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model.eval()(input_ids=torch.stack(texts))
    for handle in handles:
        handle.remove()
    shape = torch.stack([oracle(state.double() @ matrix.T) for state in states])  # [layers, B, T]
    for tokens, part in (("first", shape[..., :1]), ("rest", shape[..., 1:])):
        lines = {line.get("layer"): line["value"] for line in found if line["tokens"] == tokens}
        assert lines[None] == pytest.approx(float(part.mean()), rel=1e-5)
        assert lines[0] == pytest.approx(float(part[0].mean()), rel=1e-5)
        assert lines[1] == pytest.approx(float(part[1].mean()), rel=1e-5)
