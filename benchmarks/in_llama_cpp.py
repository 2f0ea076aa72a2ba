"""One GGUF in llama.cpp, for benchmarks.servers; runs in an environment without clearhead.

Usage: python in_llama_cpp.py FILE

Requests and answers are those of in_vllm.py.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
from llama_cpp import Llama

(FILE,) = sys.argv[1:]
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))


def opened(**options: Any) -> Any:
    counts = {"n_ctx": 640, "n_batch": 640, "n_threads": THREADS, "n_threads_batch": THREADS}
    return Llama(FILE, verbose=False, **counts, **options)


llama = opened()


def losses(rows: list[list[int]]) -> list[list[float]]:
    """−log p of each token after the first of a row, in nats."""
    whole, answers = opened(logits_all=True), []
    for ids in rows:
        whole.reset()
        whole.eval(ids)
        scores = whole.scores[: len(ids) - 1].astype(np.float64)
        top = scores.max(-1)
        sums = np.log(np.exp(scores - top[:, None]).sum(-1)) + top
        answers.append((sums - scores[np.arange(len(ids) - 1), ids[1:]]).tolist())
    whole.close()
    return answers


def seconds(rows: list[list[int]], tokens: int) -> list[float]:
    """How long the rows take one after another, with so many tokens after each: by the clock, of
    the CPU."""
    clock, cpu = time.perf_counter(), time.process_time()
    for ids in rows:
        llama.reset()
        llama.eval(ids)
        for _ in range(tokens - 1):
            scores = np.ctypeslib.as_array(llama._ctx.get_logits_ith(-1), (llama.n_vocab(),))
            llama.eval([int(scores.argmax())])
    return [time.perf_counter() - clock, time.process_time() - cpu]


KNOWN = {one.__name__: one for one in (losses, seconds)}
for line in sys.stdin:
    request = json.loads(line)
    answer = KNOWN[request.pop("what")](**request)
    print(f"answer {json.dumps(answer)}", flush=True)
