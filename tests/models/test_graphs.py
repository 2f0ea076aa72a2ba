"""Compiled layers: the kernels that they are given, and how many graphs they are."""

from itertools import product

import pytest
import torch
from torch._dynamo.utils import counters

from clearhead import ClearheadForCausalLM, ClearheadForMaskedLM, preset
from clearhead.models.inspection import decoder_layers
from clearhead.ops import dispatch
from clearhead.ops.requests import Request

from .space import DISTINCT

SHAPE = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97}
SHAPE |= {"max_position_embeddings": 64, "intermediate_size": 32}
HOPPER = {"device": "cuda", "ordinal": 0, "capability": (9, 0), "dtype": torch.bfloat16}
LENGTH = 40
# Softmax that needs no log-sum-exp, over values as wide as keys, is PyTorch's own call.
EXCHANGED = {"sink", "key-value"}
WIDE = {"alibi", "forget", "differential", "pope"}
# The first layer's values are its own matrix, the others' the stream.
TWO_KINDS = {"sas", "sas-p-nonorm", "bert-sas"}


def _inputs(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, 97, (2, LENGTH))
    inputs = {"input_ids": ids, "labels": ids}
    place = torch.arange(LENGTH).expand(2, -1)
    if kind == "padded":
        inputs["attention_mask"] = (place >= torch.tensor([[0], [9]])).long()
    if kind == "packed":
        inputs |= {"document_ids": place // 20, "position_ids": place % 20}
    return inputs


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "plain") for name in (*DISTINCT, "transformer", "bert-sas")),
        *product(("transformer", "sas"), ("padded", "packed")),
    ],
)
def test_a_compiled_request_is_given_the_eager_ones_kernel_on_a_gpu(name, kind, monkeypatch):
    """And layers that are alike share one graph, whatever their index, gains and λ_init."""
    asked: list[Request] = []
    chosen = dispatch._chosen

    def record(names: str, *arguments: object) -> str:
        asked.append(dispatch.request(*arguments))
        return chosen(names, *arguments)

    monkeypatch.setattr(dispatch, "_chosen", record)
    config = preset(name, **SHAPE)
    cls = ClearheadForMaskedLM if config.direction == "bidirectional" else ClearheadForCausalLM
    model, inputs, requests = cls(config).train(), _inputs(kind), {}
    for how in ("eager", "compiled"):
        asked.clear()
        if how == "compiled":
            torch._dynamo.reset()
            counters.clear()
            for layer in decoder_layers(model):
                layer.compile(backend="eager")
        model(**inputs).loss.backward()
        requests[how] = {each._replace(**HOPPER) for each in asked}
    graphs = 2 if name in TWO_KINDS else 1
    assert counters["stats"]["unique_graphs"] == graphs
    kernels = {how: {dispatch.resolve(each).name for each in requests[how]} for how in requests}
    want = "flash-packed"
    if kind == "plain":
        want = "cudnn" if name in EXCHANGED | WIDE else "sdpa"
    if (name, kind) == ("key-value", "plain"):  # of a CPU alone: its tiles join the prefix
        kernels["eager"] = {"cudnn"}
    names = set() if name == "softpick" else {want}  # which is plain PyTorch
    assert kernels == {"eager": names, "compiled": names}
    torch._dynamo.reset()
