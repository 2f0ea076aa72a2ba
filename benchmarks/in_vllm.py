"""One folder in vLLM on a CPU, for benchmarks.servers; in an environment without clearhead.

Usage: python in_vllm.py FOLDER DTYPE

Each line of standard input is a request as JSON, {"what": a function below, …}; its answer is a
line of standard output that begins with `answer`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams

FOLDER, DTYPE = sys.argv[1:]
LONGEST = json.loads(Path(FOLDER, "config.json").read_text())["max_position_embeddings"]
llm = LLM(
    FOLDER,
    skip_tokenizer_init=True,
    dtype=DTYPE,
    enforce_eager=True,
    max_model_len=min(640, LONGEST),
    enable_prefix_caching=False,
)
model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def generate(rows: list[list[int]], **options: Any) -> list[Any]:
    wanted = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **options)
    prompts = [{"prompt_token_ids": ids} for ids in rows]
    return list(llm.generate(prompts, wanted, use_tqdm=False))


def losses(rows: list[list[int]]) -> list[list[float]]:
    """−log p of each token after the first of a row, in nats."""
    answers = generate(rows, max_tokens=1, prompt_logprobs=0)
    return [
        [-row[token].logprob for row, token in zip(one.prompt_logprobs[1:], ids[1:], strict=True)]
        for one, ids in zip(answers, rows, strict=True)
    ]


def likeliest(rows: list[list[int]]) -> list[list[int]]:
    """The likeliest token at each place after the first of a row."""
    answers = generate(rows, max_tokens=1, prompt_logprobs=1)
    return [
        [max(row, key=lambda token: row[token].logprob) for row in one.prompt_logprobs[1:]]
        for one in answers
    ]


def continued(rows: list[list[int]], tokens: int) -> list[list[int]]:
    """The likeliest tokens after each row, one by one."""
    return [list(one.outputs[0].token_ids) for one in generate(rows, max_tokens=tokens)]


def seconds(rows: list[list[int]], tokens: int) -> list[float]:
    """How long all rows take together, with so many tokens after each: by the clock, of the CPU."""
    clock, cpu = time.perf_counter(), time.process_time()
    generate(rows, max_tokens=tokens)
    return [time.perf_counter() - clock, time.process_time() - cpu]


def layers(row: list[int], file: str) -> int:
    """Write inputs, "LAYER.x" [T, I], and outputs, "LAYER.y" [T, O], of the quantised layers in a
    row's prefill, as safetensors."""
    seen: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Any:
        def after(module: Any, inputs: Any, output: Any) -> None:
            seen[f"{name}.x"], seen[f"{name}.y"] = inputs[0].clone(), output[0].clone()

        return after

    quantised = {name: one for name, one in model.named_modules() if hasattr(one, "weight_scale")}
    handles = [one.register_forward_hook(hook(name)) for name, one in quantised.items()]
    generate([row], max_tokens=1)
    for handle in handles:
        handle.remove()
    save_file(seen, file)
    return len(quantised)


KNOWN = {one.__name__: one for one in (losses, likeliest, continued, seconds, layers)}
for line in sys.stdin:
    request = json.loads(line)
    answer = KNOWN[request.pop("what")](**request)
    print(f"answer {json.dumps(answer)}", flush=True)  # vLLM logs there too
