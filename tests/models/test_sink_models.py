"""`attn_implementation="clearhead"` in transformers' sink models, against their eager form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from clearhead.errors import ClearheadError
from clearhead.models import ClearheadForCausalLM, preset
from clearhead.models.attention_interface import attend_with_sinks, visible_keys
from clearhead.ops import oracles

from .space import WHOLE

SHAPE = WHOLE | {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8}
SHAPE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": EXPERTS | {"sliding_window": 5, "rope_parameters": ROPE},
    "granite_swa": {"sliding_window": 5},
    "granitemoe_swa": {**EXPERTS, "sliding_window": 5, "shared_intermediate_size": 32},
    "mimo_v2_flash": {**EXPERTS, "sliding_window": 5},
    "flint": {"sliding_window": 5},
    "openai_privacy_filter": {**EXPERTS, "sliding_window": 3},
}
ENCODERS = {"openai_privacy_filter"}
TRANSLATORS = "bart", "pegasus", "m2m_100", "nllb-moe"
CAUSAL = [family for family in FAMILIES if family not in ENCODERS]


def _model(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    config = AutoConfig.for_model(family, **SHAPE | FAMILIES.get(family, {}) | settings)
    maker = AutoModel if family in ENCODERS else AutoModelForCausalLM
    model = maker.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if "sinks" in name else 0.1)
    return model


def _ids(batch: int = 2, length: int = 13) -> torch.Tensor:
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(1))


def _translator(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    sides = ("encoder", "decoder")
    sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
    shape = {f"{side}_{name}": size for side in sides for name, size in sizes.items()}
    shape |= {"d_model": 32, "decoder_start_token_id": 2}
    shape |= dict.fromkeys((f"{side}_sparse_step" for side in sides), 0)
    config = AutoConfig.for_model(family, **SHAPE | shape | settings)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def _both(model: Any, run: Callable[[], Any]) -> list[Any]:
    """What `run` returns with the eager form, and with ours."""
    results = []
    for name in ("eager", "clearhead"):
        model.set_attn_implementation(name)
        results.append(run())
    return results


def _close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found - wanted).abs().max() <= 2e-6 * wanted.abs().max()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_all_gradients_equal_the_eager_form(family, padded):
    model, ids = _model(family), _ids()
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = mask[1, -4:] = 0
    weight = torch.randn(2, 13, 1, generator=torch.Generator().manual_seed(2)) * mask[..., None]

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        out = model(ids, attention_mask=mask if padded else None)[0]
        (out * weight).square().sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return out.detach()[mask.bool()], gradients

    (wanted, exact), (found, gradients) = _both(model, run)
    _close(found, wanted)
    assert gradients.keys() == exact.keys()
    assert any("sinks" in name for name in exact)
    largest = max(gradient.abs().max() for gradient in exact.values())
    for name, gradient in exact.items():
        assert (gradients[name] - gradient).abs().max() <= 2e-6 * largest, name


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", CAUSAL)
def test_cached_generation_writes_what_the_eager_form_writes(family, cache):
    model, ids = _model(family), _ids(length=7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    options |= {"eos_token_id": None, "cache_implementation": cache, "disable_compile": True}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    eager, ours = _both(model, lambda: model.generate(ids, **options))
    assert torch.equal(eager.sequences, ours.sequences)
    _close(torch.stack(ours.logits), torch.stack(eager.logits))


@pytest.mark.parametrize(("read", "written"), [(11, 5), (5, 11), (7, 7)])
@pytest.mark.parametrize("family", TRANSLATORS)
@torch.no_grad()
def test_cross_attention_reads_the_whole_text(family, read, written):
    model, source, target = _translator(family), _ids(length=read), _ids(length=written)
    mask = torch.ones_like(source)
    mask[0, -2:] = mask[1, :1] = 0
    inputs = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}
    eager, ours = _both(model, lambda: model(**inputs).logits)
    _close(ours, eager)


@pytest.mark.parametrize(("family", "beams"), [("bart", 1), ("pegasus", 3), ("nllb-moe", 3)])
def test_cached_translations_are_those_of_the_eager_form(family, beams):
    model, source = _translator(family), _ids(length=11)
    mask = torch.ones_like(source)
    mask[0, -4:] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "num_beams": beams}
    eager, ours = _both(model, lambda: model.generate(source, do_sample=False, **options))
    assert torch.equal(ours, eager)


def test_packed_texts_are_kept_apart():
    model, ids = _model("granite_swa"), _ids(batch=1, length=12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    eager, ours = _both(model, lambda: model(ids, position_ids=positions, use_cache=False).logits)
    _close(ours, eager)
    _close(ours[:, 5:], model(ids[:, 5:]).logits)


SPARSE = {"num_experts": 4, "encoder_sparse_step": 2}  # whose routers read the mask
OTHER_MASK = r"mask of its own or the caller's.*\[batch, tokens\]"


def _ours() -> ClearheadForCausalLM:
    shape = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1}
    return ClearheadForCausalLM(preset("transformer", **shape, num_attention_heads=2))


@pytest.mark.parametrize(
    ("make", "inputs", "said"),
    [
        *(  # models that write keys into the mask
            (lambda family=family: _model(family), {}, rf"{family}.*implementation\('eager'\)")
            for family in ("deepseek_v4", "hy_v4")
        ),
        (lambda: _model("doge"), {}, "doge, which computes with its attention mask"),
        *(
            (lambda family=family: _translator(family, **SPARSE), {}, f"{family}, which computes")
            for family in ("bigbird_pegasus", "nllb-moe")
        ),
        (_ours, {}, OTHER_MASK),
        (lambda: _model("granite_swa", attention_dropout=0.1).train(), {}, "dropout"),
        (lambda: _model("granite_swa"), {"attention_mask": torch.zeros(2, 1, 13, 13)}, OTHER_MASK),
    ],
)
def test_what_would_get_other_numbers_is_refused_in_one_line(make, inputs, said):
    model = make()
    model.set_attn_implementation("clearhead")
    with pytest.raises(ClearheadError, match=said) as error:
        model(_ids(), **inputs)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keyword", ["block_indices", "sinks", "of_tomorrow"])
def test_a_keyword_that_is_not_known_to_be_harmless_is_refused(keyword):
    mask = visible_keys(1, 3, 3, config=_model("llama").config)
    q, module = torch.randn(1, 2, 3, 8), torch.nn.Module()
    known = {"sliding_window": 4, "use_cache": True, keyword: None}
    out, _ = attend_with_sinks(module, q, q, q, mask, **known)
    torch.testing.assert_close(out.transpose(1, 2), oracles.attend(q, q, q).float())
    with pytest.raises(ClearheadError, match=f"Module with {keyword}: call"):
        attend_with_sinks(module, q, q, q, mask, **known | {keyword: torch.ones(2)})
    k = torch.randn(1, 2, 4, 8)
    with pytest.raises(ClearheadError, match=r"\[3, 4\] queries and keys under a mask of \[3, 3\]"):
        attend_with_sinks(module, q, k, k, mask)


def test_the_lines_of_the_page_on_serving_work_as_written():
    page = Path(__file__).parents[2].joinpath("docs", "serving.md").read_text("utf-8")
    section = page.partition("## Sink models of transformers")[2]
    lines = section.partition("```python\n")[2].partition("```")[0]
    model = _model("gpt_oss")
    wanted = model(_ids()).logits
    exec(compile(lines, "serving.md", "exec"), {"model": model})
    assert model.config._attn_implementation == "clearhead"
    _close(model(_ids()).logits, wanted)


@pytest.mark.parametrize("family", ["llama", "afmoe"])
def test_ordinary_models_run_too(family):
    model = _model(family, num_hidden_layers=1)
    eager, ours = _both(model, lambda: model(_ids()).logits)
    _close(ours, eager)
    if family == "llama":
        torch._dynamo.reset()
        _close(torch.compile(model, backend="eager")(_ids()).logits, eager)
