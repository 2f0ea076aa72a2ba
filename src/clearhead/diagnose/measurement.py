"""All measurements of a model in one pass over the text."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from clearhead.diagnose.attention import attention_statistics
from clearhead.diagnose.hidden import hidden_statistics
from clearhead.models.inspection import batches, evaluating, run_backbone


def measure(model: Any, windows: Iterable[Tensor], *, batch_size: int) -> list[dict[str, Any]]:
    """Attention to the first token and outliers in the hidden states, over windows of text.

    Args:
        model: any causal language model of transformers that uses its AttentionInterface. Its mode
            and its attention implementation are left as they were.
        windows: int64 [T] each, text from position 0 on, all of one length.
        batch_size: windows run together; it changes speed and memory, not the results.

    Returns:
        Payloads of "measure" records, each with "metric" and "value":
        "first_token_argmax_share", "first_token_mass" and, under softmax-1 or sinks, "null_mass",
        with "map" and, unless pooled, "layer" and "head"; "chance_floor";
        "kurtosis", "largest_activation" and "maximum_activation", with "tokens" ("first" or
        "rest") and, unless over all layers, "layer". NaN where there is no such token.

    Raises:
        ClearheadError: windows or a model that this cannot be measured on.
    """
    with (
        evaluating(model),
        attention_statistics(model) as attention,
        hidden_statistics(model) as hidden,
    ):
        for ids_BT in batches(model, windows, batch_size):
            run_backbone(model, ids_BT)  # no need of logits
    return attention.measures() + hidden.measures()
