"""What vLLM makes of folders of models; run in an environment of its own, without clearhead.

Usage: python ask_vllm.py PROMPTS.json OUT.json FOLDER…
"""

import gc
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}

import answers
from vllm import LLM, SamplingParams

PROMPTS, OUT, *FOLDERS = sys.argv[1:]


def ask(
    folder: str,
    prompts: list[list[int]],
    tokens: int,
    vocabulary: int,
    implementation: str = "transformers",
    dtype: str = "float32",
) -> dict[str, Any]:
    """Log-probabilities of every next token of the prompts, and greedy continuations."""
    llm = LLM(
        folder,
        model_impl=implementation,
        trust_remote_code=True,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=128,
        max_logprobs=vocabulary,
        enable_prefix_caching=False,
    )
    wanted = SamplingParams(
        max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, prompt_logprobs=-1
    )
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], wanted)
    del llm
    gc.collect()
    return {
        "logprobs": [
            [[row[i].logprob for i in range(vocabulary)] for row in each.prompt_logprobs[1:]]
            for each in found
        ],
        "tokens": [list(each.outputs[0].token_ids) for each in found],
    }


answers.write(ask, PROMPTS, OUT, FOLDERS)
