"""Folders of `quantize --save` in vLLM on a CPU, against the simulation: `make servers`."""

import json
import subprocess

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.servers_agreement import PROGRAMS, Side, as_served, by_layer
from clearhead.data.tokenizer import train
from clearhead.quantize import Texts, quantized, scheme
from tests.servers.test_servers import BUILT, HERE, PROMPTS, SHAPE, TOKENS, needs_servers, own

RECORD = HERE.parents[1] / "results" / "servers-few-bits.json"
PAGE = HERE.parents[1] / "docs" / "quantize.md"
# Scheme → vLLM's dtype: it multiplies 4 bits in bfloat16 alone, and has no fp8-static on a CPU.
DTYPES = {
    "w8a8-token": "float32",
    "w8a8-static": "float32",
    "fp8-token": "float32",
    "w4a16-channel": "bfloat16",
    "w4a16-group64": "bfloat16",
}
# Of a log-probability, beside how far the scheme moves it: numbers near ties round over.
BOUND = 0.2
# Of a layer's output, for the same input: in the median, and where one number was next to a tie.
EXACT, ONE_OVER = 1e-6, 1e-3
# Of continued tokens: of a random model many are nearly as likely.
SAME = 0.9


def _model_and_texts():
    torch.manual_seed(1)
    shape = SHAPE | {"num_key_value_heads": 2, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.08)).eval()
    calibration = list(torch.randint(0, SHAPE["vocab_size"], (8, 64)))
    return model, Texts(windows=[], calibration=calibration)


def _save(name, folder):
    pytest.importorskip("compressed_tensors")
    from clearhead.quantize.compressed import compress

    model, texts = _model_and_texts()
    compressor = compress(model, scheme(name), texts)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    train(["a text of few words"], SHAPE["vocab_size"]).save_pretrained(folder)


@needs_servers
@pytest.mark.parametrize("name", DTYPES)
def test_vllm_computes_what_was_simulated(name, tmp_path):
    model, texts = _model_and_texts()
    full = [own(model, ids)[0] for ids in PROMPTS]
    with quantized(model, scheme(name), texts):
        simulated, tokens = zip(*(own(model, ids) for ids in PROMPTS), strict=True)
    folder = tmp_path / name
    _save(name, folder)
    asked = {"prompts": PROMPTS, "tokens": TOKENS, "vocabulary": SHAPE["vocab_size"]}
    asked |= {"implementation": "auto", "dtype": DTYPES[name]}
    (tmp_path / "prompts.json").write_text(json.dumps(asked))
    words = [BUILT / "bin" / "python", HERE / "ask.py", "vllm"]
    files = [tmp_path / "prompts.json", tmp_path / "answers.json"]
    subprocess.run([*words, *files, folder], check=True, cwd=tmp_path, timeout=600)
    (answer,) = json.loads(files[1].read_text()).values()
    gap, moved = (
        max(
            float((torch.tensor(one) - own).abs().max())
            for one, own in zip(other, simulated, strict=True)
        )
        for other in (answer["logprobs"], [each.tolist() for each in full])
    )
    assert gap <= BOUND * moved
    equal = torch.tensor(answer["tokens"]) == torch.tensor(tokens)
    assert equal.float().mean() >= SAME


@needs_servers
@pytest.mark.parametrize("name", ["w8a8-token", "w8a8-static"])
def test_vllm_computes_each_layer_as_simulated_to_rounding(name, tmp_path):
    """Given the same input; whole models part wherever a number lies next to a tie."""
    _save(name, folder := tmp_path / name)
    words = [BUILT / "bin" / "python", PROGRAMS / "in_vllm.py", folder, "float32"]
    side = Side("vllm", "tiny", name, folder, [str(word) for word in words], tmp_path / "log")
    model, texts = _model_and_texts()
    with quantized(model, as_served(name), texts):
        found = by_layer(model, side, tmp_path / "layers.safetensors", PROMPTS[0])
    side.close()
    assert found["layers"] == 4 * SHAPE["num_hidden_layers"]
    assert found["median_layer_error"] <= EXACT
    assert found["largest_layer_error"] <= ONE_OVER


def table(rows):
    """The page's table of the record, line by line."""
    costs = {(row["model"], row["form"]): row["cost"] for row in rows if row["kind"] == "simulated"}
    for row in rows:
        if row["kind"] not in ("vllm", "llama.cpp"):
            continue
        speeds = [
            f"{row[f'{what}_tokens_a_second']:.0f} ({row[f'{what}_ratio']:.2f})"
            for what in ("decoding", "prefill")
        ]
        priced = [f"{row['plain_cost']:+.1%}", f"{row['prefixed_cost']:+.1%}"]
        whole = "whole" if row["model"] == "repaired" else "original"
        inside = costs.get((whole, row["form"]))
        cells = [row["kind"], row["model"], f"`{row['form']}`", f"{row['bytes'] / 1e6:.0f}"]
        cells += [*speeds, *priced, "" if inside is None else f"{inside:+.1%}"]
        yield f"| {' | '.join(cells)} |".replace("%", " %").replace("|  |", "| |")


def tokens_table(rows):
    """The page's table of equal tokens, line by line."""
    for row in rows:
        if row["kind"] != "tokens":
            continue
        for dtype in dict.fromkeys((row["dtype"], "float32")):
            equal = [str(row[f"equal_in_{dtype}"][first]) for first in ("8", "16", "32")]
            place = [f"{row['model']}, `{row['form']}`", row["prompts"]]
            cells = [*place, row["dtype"], dtype, *equal]
            yield f"| {' | '.join(cells)} |"


def test_the_page_says_what_the_record_of_saved_folders_has():
    rows = json.loads(RECORD.read_text("utf-8"))
    text = " ".join(PAGE.read_text("utf-8").split())
    assert all(row["commit"] and row["command"] for row in rows)
    for line in (*table(rows), *tokens_table(rows)):
        assert " ".join(line.split()) in text
    agreed = {(row["model"], row["form"]): row for row in rows if row["kind"] == "agreement"}
    assert agreed["original", "float32"]["vllm_equal_prompts"] == 20
    equal = {
        (row["model"], row["form"], row["prompts"]): row["equal_in_float32"]
        for row in rows
        if row["kind"] == "tokens"
    }
    for place in (
        ("original", "float32", "text"),
        ("repaired", "w8a8-token", "repeated"),
        ("original", "w4a16-group64", "repeated"),
    ):
        assert equal[place] == {"8": 20, "16": 20, "32": 20}
    token = agreed["original", "w8a8-token"]
    for words in (
        f"for {token['vllm_equal_prompts']} of 20 prompts",
        f"float64 for {token['float64_equal_prompts']}",
        f"{token['vllm_rms']:.2f} nats",
        f"{token['float64_rms']:.2f} in float64",
        f"moves them by {token['full_rms']:.2f}",
        f"by more than {token['vllm_parted_margin']:.2f} nats",
    ):
        assert words in text
    for row in agreed.values():  # the server is no further than the simulation in float64
        assert row["vllm_rms"] <= 1.25 * row["float64_rms"] + 1e-3
