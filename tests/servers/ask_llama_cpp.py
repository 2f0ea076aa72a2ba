"""What llama.cpp makes of folders of models; run in an environment of its own, without clearhead.

Usage: python ask_llama_cpp.py LLAMA_CPP PROMPTS.json OUT.json FOLDER…

LLAMA_CPP is the folder of its sources, where its converter is. The models' tokenizers are
clearhead's own, which the converter does not know by their hash: they split words as GPT-2's does.
"""

import runpy
import sys
from typing import Any

import numpy as np

sys.path.insert(0, sys.argv[1])
sys.path.insert(0, f"{sys.argv[1]}/gguf-py")

import answers
from conversion.base import TextModel
from llama_cpp import GGML_TYPE_F32, Llama

LLAMA_CPP, PROMPTS, OUT, *FOLDERS = sys.argv[1:]
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"


def ask(folder: str, prompts: list[list[int]], tokens: int, vocabulary: int) -> dict[str, Any]:
    """Log-probabilities of every next token of the prompts, and greedy continuations."""
    file = f"{folder}.gguf"
    sys.argv[1:] = [folder, "--outfile", file, "--outtype", "f32"]
    runpy.run_path(f"{LLAMA_CPP}/convert_hf_to_gguf.py", run_name="__main__")
    # Its cache has 16 bits unless told otherwise.
    llama = Llama(
        file,
        n_ctx=128,
        logits_all=True,
        verbose=False,
        n_threads=1,
        type_k=GGML_TYPE_F32,
        type_v=GGML_TYPE_F32,
    )
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


answers.write(ask, PROMPTS, OUT, FOLDERS)
