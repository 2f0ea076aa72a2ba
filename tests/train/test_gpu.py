"""Training on a CUDA device: interrupted and resumed with its random state: `make gpu-check`."""

import json
import signal

import pytest
import torch

from clearhead import ClearheadForCausalLM, preset
from clearhead.train import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _losses(output):
    lines = (output / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize("optimizer", ["adamw", "orthoadam", "muon"])
def test_a_run_goes_on_where_it_stopped(tiny, tmp_path, optimizer):
    """With dropout, so the device's generator counts. The flash kernel adds in no fixed order."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}

    def model():
        torch.manual_seed(7)
        config = preset("transformer", vocab_size=tiny.VOCABULARY, dropout=0.3, **shape)
        return ClearheadForCausalLM(config).cuda()

    config = tiny.make_config(optimizer=optimizer)
    train(model(), tiny.Batches(), config, output=tmp_path / "whole")
    stopped = train(
        model(),
        tiny.Batches(),
        config,
        output=tmp_path / "parts",
        callbacks=[tiny.SignalAt(6, signal.SIGTERM)],
    )
    assert stopped.steps == 6
    torch.cuda.manual_seed(0)
    resumed = train(model(), tiny.Batches(), config, output=tmp_path / "parts", resume=True)
    assert resumed.steps == 12
    assert _losses(tmp_path / "parts") == pytest.approx(_losses(tmp_path / "whole"), rel=1e-4)
    assert resumed.peak_memory_bytes > 0
