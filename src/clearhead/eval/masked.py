"""How well a masked language model predicts hidden tokens, on windows of any length."""

from typing import Any

import torch
import torch.nn.functional as F

from clearhead.data import Corpus, Masking, windows
from clearhead.diagnose.running import batches, evaluating
from clearhead.errors import ClearheadError

BATCH = 4096  # tokens run together


def masked_loss(
    model: Any, corpus: Corpus, *, length: int, tokens: int, share: float
) -> list[dict[str, Any]]:
    """Loss and accuracy at hidden tokens of the validation text, the same places for every model.

    Not a perplexity: each token is predicted from the others of its window that are shown, those
    after it too, so it compares with no causal model's.

    Args:
        corpus: with a mask token (`clearhead.data.with_mask_token`).
        length: tokens of a window.
        tokens: validation tokens read, or what there is.
        share: of the tokens hidden.

    Returns:
        Payloads of "measure" records: "masked loss" (nats a hidden token) and "masked accuracy".
    """
    masking = Masking(corpus.tokenizer, share)
    texts = windows(corpus, length=length, count=max(1, tokens // length))
    loss, right, count = 0.0, 0, 0
    with evaluating(model):
        for number, ids_BT in enumerate(batches(model, texts, max(1, BATCH // length))):
            made = masking(ids_BT.cpu().numpy(), f"validation, masks of batch {number}")
            shown_BT, labels_BT = (torch.from_numpy(array).to(ids_BT.device) for array in made)
            hidden_BT = labels_BT >= 0
            logits_NV = model(input_ids=shown_BT).logits[hidden_BT].float()
            target_N = labels_BT[hidden_BT]
            losses_N = F.cross_entropy(logits_NV, target_N, reduction="none")
            loss += float(losses_N.double().sum())
            right += int((logits_NV.argmax(-1) == target_N).sum())
            count += len(target_N)
    if not count:
        raise ClearheadError("the validation text has only special tokens: nothing was hidden")
    told = {"split": "validation", "length": length, "predicted_tokens": count}
    return [
        {"metric": "masked loss", "value": loss / count, **told},
        {"metric": "masked accuracy", "value": right / count, **told},
    ]
