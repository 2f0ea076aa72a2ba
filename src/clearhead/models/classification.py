"""Classification and regression of texts: the trunk, one token's state, and a small head."""

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple

from clearhead.errors import ClearheadError
from clearhead.models.base_model import ClearheadModel, ClearheadPreTrainedModel
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.inputs import Options, check_below
from clearhead.ops.precision import has_numbers

WIDTH = 1024  # of the head's hidden layer, at every size of the trunk, as in the crammed BERT
REGRESSION, CLASSES = "regression", "single_label_classification"


class ClassificationHead(nn.Module):
    """tanh(x W + b), dropout, one more matrix with bias: [B, C] → [B, num_labels]."""

    def __init__(self, config: ClearheadConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, WIDTH)
        self.dropout = nn.Dropout(config.dropout)
        self.out_proj = nn.Linear(WIDTH, config.num_labels)

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.out_proj(self.dropout(torch.tanh(self.dense(x_BC))))


class ClearheadForSequenceClassification(ClearheadPreTrainedModel):
    """Classifies texts, or with `num_labels=1` gives each a number.

    The head reads one token's final state: in a bidirectional model the first token's, as the
    crammed BERT's pooler does ("zero_index"); in a causal model the last token's, the only one that
    has seen the whole text. Padding does not count as first or last, so that the logits depend
    neither on its amount nor on its side.
    """

    objective = "classification"  # what the training loop holds the batches to

    def __init__(self, config: ClearheadConfig, **unknown: Any) -> None:
        super().__init__(config, **unknown)
        self.problem = _problem(config)
        self.model = ClearheadModel(config)
        self.classifier = ClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **options: Unpack[Options],
    ) -> SequenceClassifierOutput:
        """Logits [B, num_labels], and the mean loss where labels are given.

        Args:
            attention_mask: [B, T], 0 for padding on either side; needed where there is any.
            labels: int64 [B], classes from 0; for regression float [B], its loss the squared error.
            num_items_in_batch: divides the summed loss instead of the number of texts.
            **options: `clearhead.models.inputs.Options`. A row is one text.

        Raises:
            ClearheadError: a label outside the classes; padding without an attention_mask.
        """
        given: Any = options
        if any(given.get(key) is not None for key in ("position_ids", "document_ids")):
            raise ClearheadError("a row is one text: leave out position_ids and document_ids")
        pad, unmasked = self.config.pad_token_id, attention_mask is None
        readable = input_ids is not None and has_numbers(input_ids)
        if unmasked and pad is not None and readable and bool((input_ids == pad).any()):  # type: ignore[union-attr]
            raise ClearheadError(
                f"there are pad tokens ({pad}) but no attention_mask: give the mask that the "
                "tokenizer returned, so that padding is left out"
            )
        options["use_cache"], options["return_dict"] = options.get("use_cache") or False, True
        out = self.model(input_ids, attention_mask, **options)
        x_BTC = out.last_hidden_state
        row_B = torch.arange(x_BTC.shape[0], device=x_BTC.device)
        logits_BN = self.classifier(x_BTC[row_B, self._place(attention_mask, x_BTC)])
        loss = None
        if labels is not None:
            total = self._summed_loss(logits_BN, labels)
            loss = total / (x_BTC.shape[0] if num_items_in_batch is None else num_items_in_batch)
        return SequenceClassifierOutput(
            loss=loss,  # type: ignore[arg-type]
            logits=logits_BN,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )

    def _place(self, attention_mask: Tensor | None, x_BTC: Tensor) -> Tensor:
        """Index of the token that the head reads in each row, int64 [B]."""
        batch, length = x_BTC.shape[:2]
        causal = self.config.direction == "causal"
        index_BT = torch.arange(length, device=x_BTC.device).expand(batch, -1)
        seen_BT = index_BT >= 0 if attention_mask is None else attention_mask.bool()
        if causal:
            return torch.where(seen_BT, index_BT, 0).amax(-1)
        return torch.where(seen_BT, index_BT, length - 1).amin(-1)

    def _summed_loss(self, logits_BN: Tensor, labels: Tensor) -> Tensor:
        logits_BN = logits_BN.float()
        if self.problem == REGRESSION:
            return F.mse_loss(logits_BN, labels.float().view_as(logits_BN), reduction="sum")
        check_below(logits_BN.shape[-1], labels, "labels", "the classes")
        return F.cross_entropy(logits_BN, labels.flatten(), reduction="sum")


def _problem(config: ClearheadConfig) -> str:
    """Kind of labels; by default a number where there is one label, else a class."""
    kind = config.problem_type or (REGRESSION if config.num_labels == 1 else CLASSES)
    if kind not in (REGRESSION, CLASSES) or (kind == REGRESSION and config.num_labels != 1):
        raise ClearheadError(
            f"problem_type is {kind!r}, with num_labels={config.num_labels}: choose {CLASSES}, or "
            f"{REGRESSION} with num_labels=1"
        )
    return kind
