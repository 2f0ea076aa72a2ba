"""The dispatch table of attention: what is chosen, why, by whose word, and what it must prove."""

import logging
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks import dispatch_table
from clearhead.errors import ClearheadError
from clearhead.ops import attend, differential, dispatch, oracles, self_test, tiles
from clearhead.ops.requests import HALF, Request

CPU = dispatch_table.PLAIN
HOPPER = CPU._replace(device="cuda", ordinal=0, capability=(9, 0), dtype=torch.bfloat16)


class _Wrong:
    """Tiles whose log-sum-exp is to base 2, as some kernels have it."""

    backward = staticmethod(tiles.backward)

    @staticmethod
    def forward(*tensors, **options):
        o, lse = tiles.forward(*tensors, **options)
        return o, lse * 1.4427


def test_the_documentation_has_the_table_of_the_code():
    page = Path(__file__).parents[2].joinpath("docs", "performance.md").read_text("utf-8")
    assert dispatch_table.markdown() in page


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_goes_by_tiles_on_cuda(capability, dtype):
    """Every kind of request there is, not only those that the documentation prints."""
    names = ("causal", "window", "key_mask", "segments", "learning", "sink")
    shapes = [{"square": True}, {"square": False}, {"square": False, "lone": True}]
    for values in product([False, True], repeat=len(names)):
        for shape, depth, width in product(shapes, [64, 320], [64, 128, 320]):
            asked = HOPPER._replace(dtype=dtype, capability=capability, depth=depth, width=width)
            asked = asked._replace(**dict(zip(names, values, strict=True)), **shape)
            two_sided = asked.window and not asked.causal  # of no model: `attend` alone has it
            flash = dtype in HALF and capability >= (8, 0) and max(depth, width) <= 256
            plain = not (asked.window or asked.segments or asked.key_mask or asked.sink)
            sdpa = plain and dtype != torch.float64 and capability >= (8, 0) and depth == width
            lone = asked.lone and not (asked.window or asked.segments)
            bfloat16 = dtype == torch.bfloat16 and capability < (8, 0)
            efficient = asked.square and dtype != torch.float64 and not (bfloat16 or two_sided)
            efficient |= sdpa and not asked.causal  # PyTorch's choice
            name = dispatch.resolve(asked).name
            assert (name == "tiles") != (flash or lone or efficient), (asked, name)
            # The compiled path takes the eager path's kernel.
            compiled = asked._replace(compiled=True, short=True)
            assert dispatch.resolve(compiled).name == name


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
        def forward(*tensors, **options):
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
    assert line.endswith("causal, T = S: tiles (not flash: it runs on cuda)")
    monkeypatch.setenv(dispatch.VARIABLE, "cudnn")
    with pytest.raises(ClearheadError, match=r"cudnn: it runs on cuda.*name tiles too") as error:
        attend(q, q, q)
    assert "\n" not in str(error.value)
    monkeypatch.setenv(dispatch.VARIABLE, "flsh")
    with pytest.raises(ClearheadError, match="did you mean flash"):
        attend(q, q, q)
    assert torch.allclose(attend(q, q, q, kernel="tiles"), want, atol=1e-5)


def test_the_names_govern_a_lone_query_of_differential_attention(monkeypatch, caplog):
    """By argument and by environment: both maps at once, or one by one by the kernel named."""
    q, k, v = torch.randn(1, 4, 1, 24), *torch.randn(2, 1, 2, 11, 24).unbind()
    lam = torch.tensor(0.3)
    plain = {"norm_weight": None, "norm_eps": None, "gain": 1.0}
    want = oracles.differential(q, k, v, lam, **plain).float()

    def kernels(names: str | None = None, **options: object) -> list[str]:
        dispatch._chosen.cache_clear()
        caplog.clear()
        if names is not None:
            monkeypatch.setenv(dispatch.VARIABLE, names)
        with caplog.at_level(logging.INFO, "clearhead.ops.dispatch"):
            got = differential(q, k, v, lam, **plain, **options)
        assert torch.allclose(got, want, atol=1e-5)
        return [line.rpartition(": ")[2] for line in caplog.messages]

    assert kernels() == ["differential-products"]
    assert kernels(kernel="tiles") == ["in two steps", "tiles"]
    assert kernels("tiles,differential-products") == ["in two steps", "tiles"]
    assert kernels("differential-products,tiles") == ["differential-products"]
    assert kernels("split-decode,tiles")[0].endswith("it runs on cuda)")
    dispatch._chosen.cache_clear()


def test_unrotated_keys_have_a_kernel_on_a_cpu_and_one_on_a_gpu():
    asked = CPU._replace(**dispatch_table.REQUESTS["decoding, CoCA"])
    assert dispatch.resolve(asked) == ("unrotated-products", {})
    learning = {"unrotated-products": "it has no gradient"}
    assert dispatch.resolve(asked._replace(learning=True)) == ("", learning)
    asked = HOPPER._replace(**dispatch_table.REQUESTS["decoding, CoCA"])
    assert dispatch.resolve(asked).name == "split-decode"
    refused = dispatch.resolve(asked, failure=lambda kernel, request: "o is off")
    assert refused == ("", {"split-decode": "o is off"})
    assert dispatch.resolve(asked._replace(learning=True)).refusals["split-decode"]


def test_a_request_says_itself():
    asked = Request(*HOPPER)._replace(width=128, key_mask=True, segments=True, square=False)
    assert str(asked) == (
        "cuda, bfloat16, 64 wide, values 128 wide, causal, T < S, padding, documents"
    )


def test_one_choice_for_lengths_that_a_compiler_does_not_know():
    torch._dynamo.reset()
    run = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for queries in (7, 40, 1):
        q, k = torch.randn(1, 4, queries, 8), torch.randn(1, 2, queries + 3, 8)
        assert torch.allclose(run(q, k, k, sink=0.0), attend(q, k, k, sink=0.0), atol=1e-5)
