"""Annealed parts of compiled models."""

import torch

import clearhead
from clearhead import ClearheadForCausalLM, preset
from clearhead.nn import annealing

SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 31}


def test_a_compiled_training_moves_the_parts_and_an_eager_one_after_it_too():
    torch._dynamo.reset()
    torch.manual_seed(0)
    annealed = {"normalizer": "softmax1", "annealed_start": True}
    model = ClearheadForCausalLM(preset("transformer", **annealed, **SHAPE)).train()
    clearhead.anneal(model, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.arange(16)[None]
    compiled = torch.compile(model, backend="aot_eager")
    offsets = []
    for trained in (compiled, compiled, model, model):
        offset = next(b for name, b in model.named_buffers() if name.endswith("offset"))
        offsets.append(float(offset))
        trained(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    offsets.append(float(offset))
    assert offsets == sorted(set(offsets))
    assert offsets[-1] == 0
    assert not annealing._passes
