"""The dispatch table of attention: what is chosen, why, by whose word, and what it must prove."""

import logging
from pathlib import Path

import pytest
import torch

from benchmarks import dispatch_table
from clearhead.errors import ClearheadError
from clearhead.ops import attend, dispatch, oracles, self_test, tiles

CPU = dispatch_table.PLAIN
HOPPER = CPU._replace(device="cuda", ordinal=0, capability=(9, 0), dtype=torch.bfloat16)


class _Wrong:
    """Tiles whose log-sum-exp is to base 2, as some kernels have it."""

    backward = staticmethod(tiles.backward)

    @staticmethod
    def forward(call):
        o, lse = tiles.forward(call)
        return o, lse * 1.4427


def test_the_documentation_has_the_table_of_the_code():
    page = Path(__file__).parents[2].joinpath("docs", "performance.md").read_text("utf-8")
    assert dispatch_table.markdown() in page


def test_a_kernel_that_fails_its_test_on_the_device_is_passed_over_and_the_reason_kept():
    choice = dispatch.resolve(HOPPER, failure=lambda kernel, request: "dq is off")
    assert choice.name == "tiles"
    assert choice.refusals["cudnn"] == choice.refusals["efficient"] == "dq is off"


@pytest.mark.parametrize("changes", [{}, {"key_mask": True, "segments": True}, {"window": True}])
@pytest.mark.parametrize("shape", [{}, {"square": False}, {"lone": True, "square": False}])
def test_the_test_on_the_device_passes_what_is_right_and_catches_what_is_not(changes, shape):
    request = CPU._replace(shared=2, width=96, **changes, **shape)
    assert self_test.failure(tiles, request) is None
    assert "off by" in self_test.failure(_Wrong, request)


def test_a_kernel_that_raises_fails_its_test():
    class Raising:
        @staticmethod
        def forward(call):
            raise RuntimeError("no plan\nat all")

    assert self_test.failure(Raising, CPU) == "it failed: no plan"


def test_the_test_leaves_random_numbers_and_surroundings_alone():
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert self_test.failure(tiles, CPU) is None
    assert torch.equal(state, torch.get_rng_state())


def test_an_argument_or_the_environment_names_kernels_in_order(monkeypatch, caplog):
    q = torch.randn(1, 2, 7, 24)
    want = oracles.attend(q, q, q).float()
    with caplog.at_level(logging.INFO, "clearhead.ops.dispatch"):
        for _ in range(2):
            assert torch.allclose(attend(q, q, q, kernel="flash,tiles"), want, atol=1e-5)
    (line,) = caplog.messages  # once
    assert line.endswith("square, causal, kind plain: tiles (not flash: it runs on cuda)")
    monkeypatch.setenv(dispatch.VARIABLE, "cudnn")
    with pytest.raises(ClearheadError, match=r"cudnn: it runs on cuda.*name tiles too") as error:
        attend(q, q, q)
    assert "\n" not in str(error.value)
    monkeypatch.setenv(dispatch.VARIABLE, "flsh")
    with pytest.raises(ClearheadError, match="did you mean flash"):
        attend(q, q, q)
    assert torch.allclose(attend(q, q, q, kernel="tiles"), want, atol=1e-5)


def test_unrotated_keys_have_a_kernel_on_a_cpu_and_one_on_a_gpu():
    asked = CPU._replace(**dispatch_table.REQUESTS["decoding, CoCA"])
    assert dispatch.resolve(asked) == ("products", {})
    learning = {"products": "it has no gradient"}
    assert dispatch.resolve(asked._replace(learning=True)) == ("", learning)
    asked = HOPPER._replace(**dispatch_table.REQUESTS["decoding, CoCA"])
    assert dispatch.resolve(asked).name == "split-decode"
    refused = dispatch.resolve(asked, failure=lambda kernel, request: "o is off")
    assert refused.name == ""
    assert refused.refusals["split-decode"] == "o is off"
    assert dispatch.resolve(asked._replace(learning=True)).refusals["split-decode"]
