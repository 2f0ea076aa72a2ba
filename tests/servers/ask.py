"""What vLLM or llama.cpp makes of folders of models; in an environment of its own, no clearhead.

Usage: python ask.py vllm PROMPTS.json OUT.json FOLDER…
       python ask.py LLAMA_CPP PROMPTS.json OUT.json FOLDER…

LLAMA_CPP is the folder of its sources, where its converter is. The models' tokenizers are
clearhead's own, which the converter does not know by their hash: they split words as GPT-2's does.
Each answer has the log-probabilities of every next token of the prompts, and greedy continuations.
"""

import gc
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

SERVER, PROMPTS, OUT, *FOLDERS = sys.argv[1:]
if SERVER == "vllm":
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams
else:
    sys.path[:0] = [f"{SERVER}/gguf-py", SERVER]
    import numpy as np
    from conversion.base import TextModel
    from llama_cpp import GGML_TYPE_F32, Llama

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"


def ask_vllm(
    folder: str,
    prompts: list[list[int]],
    tokens: int,
    vocabulary: int,
    implementation: str = "transformers",
    dtype: str = "float32",
) -> dict[str, Any]:
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


def ask_llama_cpp(
    folder: str, prompts: list[list[int]], tokens: int, vocabulary: int
) -> dict[str, Any]:
    file = f"{folder}.gguf"
    sys.argv[1:] = [folder, "--outfile", file, "--outtype", "f32"]
    runpy.run_path(f"{SERVER}/convert_hf_to_gguf.py", run_name="__main__")
    # Its cache has 16 bits unless told otherwise.
    wide = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32}
    llama = Llama(file, n_ctx=128, logits_all=True, verbose=False, n_threads=1, **wide)
    logprobs, continued = [], []
    for ids in prompts:
        llama.reset()
        llama.eval(ids)
        scores = llama.scores[: len(ids)].astype(np.float64)[:, :vocabulary]
        top = scores.max(-1, keepdims=True)
        rows = scores - top - np.log(np.exp(scores - top).sum(-1, keepdims=True))
        logprobs.append(rows[:-1].tolist())
        new = [int(scores[-1].argmax())]
        while len(new) < tokens:
            llama.eval(new[-1:])
            new.append(int(llama.scores[llama.n_tokens - 1][:vocabulary].argmax()))
        continued.append(new)
    return {"logprobs": logprobs, "tokens": continued}


ask: Any = ask_vllm if SERVER == "vllm" else ask_llama_cpp
answers: dict[str, Any] = {}
for each_folder in FOLDERS:
    try:
        answers[each_folder] = ask(each_folder, **json.loads(Path(PROMPTS).read_text()))
    except Exception as error:  # what a refusal says belongs in the record
        answers[each_folder] = {"refused": str(error)}
    Path(OUT).write_text(json.dumps(answers))
