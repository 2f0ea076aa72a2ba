"""How well a masked language model predicts hidden tokens, on windows of any length."""

from typing import Any

import torch
import torch.nn.functional as F

from clearhead.data import Corpus, Masking, windows
from clearhead.data.batches import IGNORED, opens, told_apart
from clearhead.data.masking import SHARE
from clearhead.diagnose.running import batches, evaluating, longest_text

BATCH = 4096  # tokens run together


def masked_loss(
    model: Any,
    corpus: Corpus,
    *,
    length: int,
    tokens: int,
    share: float = SHARE,
    documents_apart: bool = False,
) -> list[dict[str, Any]]:
    """Loss and accuracy at hidden tokens of the validation text, the same places for every model.

    Not a perplexity: each token is predicted from the others of its window that are shown, those
    after it too, so it compares with no causal model's.

    Args:
        corpus: with a mask token (`clearhead.data.with_mask_token`).
        length: tokens of a window.
        tokens: validation tokens read, or what there is.
        share: of the tokens hidden.
        documents_apart: whether windows are read as training with document masks reads them: no
            document sees another, and positions begin again in each.

    Returns:
        Payloads of "measure" records: "masked loss" (nats a hidden token) and "masked accuracy";
        the value None with a "reason" where the model or the text is too short.
    """
    masking = Masking(corpus.tokenizer, share)
    told: dict[str, Any] = {"split": "validation", "length": length}
    limit = longest_text(model)
    if limit is not None and length > limit:
        return _cannot(told, f"the model has {limit} learned positions, too few for {length}")
    if not any(len(stream) >= length for stream in corpus.split("validation")):
        return _cannot(told, f"the validation split holds no window of {length:,} tokens")
    texts = windows(corpus, length=length, count=max(1, tokens // length))
    loss, right, count = 0.0, 0, 0
    with evaluating(model):
        for number, ids_BT in enumerate(batches(model, texts, max(1, BATCH // length))):
            made = masking(ids_BT.cpu().numpy(), f"validation, masks of batch {number}")
            shown_BT, labels_BT = (torch.from_numpy(array).to(ids_BT.device) for array in made)
            hidden_BT = labels_BT != IGNORED
            inputs = {"input_ids": shown_BT}
            if documents_apart:
                apart = told_apart(ids_BT, opens(ids_BT, corpus.tokenizer))
                inputs |= {name: apart[name] for name in ("position_ids", "document_ids")}
            logits_NV = model(**inputs).logits[hidden_BT].float()
            target_N = labels_BT[hidden_BT]
            loss += float(F.cross_entropy(logits_NV, target_N, reduction="none").double().sum())
            right += int((logits_NV.argmax(-1) == target_N).sum())
            count += len(target_N)
    if not count:
        return _cannot(told, "the validation text has only special tokens: nothing was hidden")
    told["predicted_tokens"] = count
    return [
        {"metric": "masked loss", "value": loss / count, **told},
        {"metric": "masked accuracy", "value": right / count, **told},
    ]


def _cannot(told: dict[str, Any], reason: str) -> list[dict[str, Any]]:
    return [
        {"metric": metric, "value": None, **told, "reason": reason}
        for metric in ("masked loss", "masked accuracy")
    ]
