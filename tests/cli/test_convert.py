"""clearhead convert, from folder to folder."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteSWAForCausalLM

from clearhead import ClearheadForCausalLM, preset
from clearhead.diagnose import diagnose
from clearhead.lab.converting import three_numbers
from clearhead.lab.prefixes import sample
from clearhead.models import conversion
from clearhead.models.families import LLAMA
from clearhead.quantize import Texts, cost, scheme

from .conftest import call, refusal, save, saved


def test_what_cannot_be_converted_leaves_nothing(tokenizer, tmp_path, capsys, monkeypatch):
    run, made = saved(tmp_path / "run", tokenizer, normalizer="key"), tmp_path / "made"
    for source, output, said in (
        (run, made, "Llama has no normalizer='key': only normalizer='softmax'"),
        (run, run, "run exists: give a folder that does not exist yet"),
        (tmp_path / "none", made, "cannot load a model"),
    ):
        assert said in refusal(capsys, "convert", source, output)
    plain = saved(tmp_path / "plain", tokenizer)

    def wrong(state: dict[str, torch.Tensor], ours: object) -> dict[str, torch.Tensor]:
        return state | {"model.norm.weight": 0 * state["model.norm.weight"]}

    other = replace(LLAMA, write=wrong)
    monkeypatch.setitem(conversion.FAMILIES, "LlamaForCausalLM", other)
    said = refusal(capsys, "convert", plain, made)
    assert "ClearheadForCausalLM gives other logits, by 1 of them" in said
    assert not [path for path in tmp_path.iterdir() if path.name not in ("run", "plain")]


@pytest.fixture
def half(llama: Path, tmp_path: Path) -> Path:
    """The tiny Llama in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    return save(tmp_path / "half", model, AutoTokenizer.from_pretrained(llama))


def test_a_rounded_model_is_measured_as_it_is_written(half, tmp_path, capsys):
    turned, served = tmp_path / "turned", tmp_path / "served"
    words = ("--rotate", "residual", "values", "--length", "24", "--windows", "2")
    assert call("convert", half, turned, *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    record = json.loads((turned / "conversion.json").read_text("utf-8"))
    weights = load_file(turned / "model.safetensors").values()
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    exact, rounded = record["measures"]
    assert exact["relative"] < 1e-5
    assert rounded["relative"] > 1e-3
    assert (record["same_in_float32"], record["same_function"]) == (True, False)
    wanted = f"in float32; rounded to bfloat16 they differ by {rounded['relative']:.1e} of their"
    assert f"with equal logits {wanted} size" in said
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in (turned, half)
    )
    ids = torch.arange(20)[None]
    with torch.no_grad():
        apart = (ours(ids).logits - theirs(ids).logits).norm() / theirs(ids).logits.norm()
    assert float(apart) == pytest.approx(rounded["relative"], rel=0.7)
    sas = preset("sas", hidden_size=36, num_attention_heads=9, num_hidden_layers=2, vocab_size=300)
    model = ClearheadForCausalLM(sas)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save(tmp_path / "sas", model.bfloat16(), AutoTokenizer.from_pretrained(half))
    assert call("convert", tmp_path / "sas", served, "--for", "serving") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "with equal logits, in float32: bfloat16 would move them by more than 1e-04" in said
    record = json.loads((served / "conversion.json").read_text("utf-8"))
    assert record["same_function"]
    assert record["relative"] < 1e-4
    weights = load_file(served / "model.safetensors").values()
    assert {weight.dtype for weight in weights} == {torch.float32}


def test_weights_beyond_sixteen_bits_are_not_written(llama, tmp_path, capsys):
    """float16 ends at 65,504; a doubled output projection may pass it."""
    made = tmp_path / "made"
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float16)
    with torch.no_grad():
        attention = model.model.layers[0].self_attn
        attention.o_proj.weight[0, 0] = 40_000
        attention.v_proj.weight[0] = 0  # nothing reads it, so that logits stay equal
    half = save(tmp_path / "half", model, AutoTokenizer.from_pretrained(llama))
    said = refusal(capsys, "convert", half, made, "--to", "gated")
    assert "o_proj.weight has weights beyond the range of float16: convert a float32" in said
    assert not made.exists()


def test_another_function_says_how_far_it_is(llama, text, tmp_path, capsys):
    made = tmp_path / "made"
    words = ("--text", str(text), "--length", "32", "--windows", "3")
    assert call("convert", llama, made, "--to", "softmax1", *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "(93 tokens of" in said
    record = json.loads((made / "conversion.json").read_text("utf-8"))
    assert not record["same_function"]
    (measure,) = record["measures"]
    assert measure["divergence"] > 1e-4
    assert "another function, for clearhead train --from to go on with" in said
    assert f"KL {measure['divergence']:.4f}" in said
    assert f"{measure['perplexity_before']:.2f} → {measure['perplexity']:.2f}" in said


def test_a_sink_is_calibrated_on_what_the_first_token_takes(llama, text, tmp_path, capsys):
    made = tmp_path / "made"
    words = ("--calibrate", str(text), "--length", "24", "--windows", "4")
    assert call("convert", llama, made, "--to", "sink", *words) == 0
    assert "calibrated beside the first token" in capsys.readouterr().out
    record = json.loads((made / "conversion.json").read_text("utf-8"))
    before, after = (
        AutoModelForCausalLM.from_pretrained(one, attn_implementation="eager")
        for one in (llama, made)
    )
    tokenizer = AutoTokenizer.from_pretrained(made)
    windows = torch.stack(sample(str(text), tokenizer, length=24, count=8)[::2])
    with torch.no_grad():
        first, maps = (
            model(windows, output_attentions=True).attentions[0] for model in (before, after)
        )
    # A sink in the first layer changes nothing that the first layer's heads compare.
    wanted = first[:, :, 1:, 0].mean((0, 2))
    assert torch.allclose(1 - maps.sum(-1)[:, :, 1:].mean((0, 2)), wanted, atol=1e-4)
    assert float(wanted.min()) > 0.01
    assert len(record["measures"]) == 2


def test_the_plain_preset_takes_no_mechanism_away(llama, going_on, tmp_path, capsys):
    """It changes no axis, so that a sink would stay and be called the transformer."""
    sink, made = tmp_path / "sink", tmp_path / "made"
    assert call("convert", llama, sink, "--to", "sink") == 0
    train = ["train", "transformer", "--from", sink, "--output", made, *going_on]
    for words in (["convert", sink, made, "--to", "transformer"], train):
        said = refusal(capsys, *words)
        assert "this model has normalizer='sink': give normalizer=softmax" in said
        assert not made.exists()
    words = ("--to", "transformer", "normalizer=softmax")
    assert call("convert", sink, made, *words) == 0
    assert "dropped: model.layers.*.self_attn.normalizer.logit" in capsys.readouterr().out


def test_a_model_for_servers_has_its_code_beside_it_and_clearhead_runs_none_of_it_unasked(
    llama, tmp_path, capsys
):
    gated, made = tmp_path / "gated", tmp_path / "made"
    assert call("convert", llama, gated, "--to", "gated", "normalizer=softmax1") == 0
    capsys.readouterr()
    assert call("convert", gated, made, "--for", "serving") == 0
    said = capsys.readouterr().out
    assert f"→ ClearheadServingForCausalLM, with equal logits: {made}" in said
    config = json.loads((made / "config.json").read_text("utf-8"))
    assert config["auto_map"].keys() == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    code = (made / "modeling_clearhead_serving.py").read_text("utf-8")
    assert "import clearhead" not in code
    assert "from clearhead" not in code
    words = ("attention", "--tokens", "4")
    assert "brings Python code of its own" in refusal(capsys, "generate", made, *words)
    assert call("generate", made, *words, "--trust-remote-code") == 0
    served = capsys.readouterr().out
    assert call("generate", gated, *words) == 0
    assert capsys.readouterr().out == served


def test_what_servers_have_no_place_for_is_refused_and_nothing_written(llama, tmp_path, capsys):
    made, null = tmp_path / "made", tmp_path / "null"
    assert call("convert", llama, null, "--to", "key-bias") == 0
    assert call("convert", llama, tmp_path / "sink", "--to", "sink") == 0
    assert call("convert", tmp_path / "sink", tmp_path / "g", "--for", "llama.cpp") == 0
    assert "→ GraniteSWAForCausalLM, with equal logits" in capsys.readouterr().out
    for source, words, said in (
        (null, ("serving",), "normalizer='key' does not fit: it has 'softmax'"),
        (null, ("llama.cpp",), "no family for this model: Llama has no normalizer='key'"),
        (llama, ("serving",), "a LlamaForCausalLM is served as it is"),
        (llama, ("serving", "--to", "gated"), "--for is a step of its own"),
    ):
        assert said in refusal(capsys, "convert", source, made, "--for", *words)
    assert not made.exists()


def test_the_commands_of_the_page_on_repair_work_as_written(llama, text, tmp_path, monkeypatch):
    page = Path(__file__).parents[2].joinpath("docs", "repair.md").read_text("utf-8")
    commands = page.partition("## What to choose")[2].split("```")[1].split("\n")[1:-1]
    monkeypatch.chdir(tmp_path)
    for command in commands:
        name, *words = shlex.split(command)
        assert name == "clearhead"
        places = {"MODEL": str(llama), "TEXT": str(text)}
        assert call(*(places.get(word, word) for word in words)) == 0, command
    granite, sink = (AutoModelForCausalLM.from_pretrained(name) for name in ("granite", "sink"))
    assert type(granite) is GraniteSWAForCausalLM
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(granite(ids).logits, sink(ids).logits, atol=1e-5)


@pytest.mark.parametrize("name", ["transformer", "differential"])
def test_the_three_numbers_are_those_of_the_other_verbs(name):
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ClearheadForCausalLM(preset(name, **shape)).eval()
    windows = list(torch.randint(0, 64, (2, 24)))
    numbers = three_numbers(model, windows)
    measures = {
        (one["metric"], one.get("map")): one["value"]
        for one in diagnose(model, windows, batch_size=1).measures
        if "layer" not in one
    }
    map_name = "difference" if name == "differential" else "softmax"
    assert numbers["sink"] == pytest.approx(measures["first_token_argmax_share", map_name])
    top, median = (measures[f"hidden_{one}", None] for one in ("top_1", "median"))
    assert numbers["largest_state"] == pytest.approx(top / median)
    texts = Texts(windows=windows)
    full, rounded = (cost(model, one, texts).perplexity for one in (None, scheme("w8a8-coarse")))
    assert full
    assert rounded
    assert numbers["eight_bits"] == pytest.approx(rounded / full - 1)
