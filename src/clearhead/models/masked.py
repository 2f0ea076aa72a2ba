"""The masked language model: the trunk, and a head that predicts tokens that were hidden."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import can_return_tuple

from clearhead.errors import ClearheadError
from clearhead.models.base_model import ClearheadModel
from clearhead.models.causal import IGNORED, check_labels, read_by, summed_loss
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.pretrained import ClearheadPreTrainedModel


class ClearheadForMaskedLM(ClearheadPreTrainedModel):
    """Predicts each token from the whole text; the head is the embedding's weight unless told
    otherwise, without a transform or bias before it, as in the crammed BERT (arXiv 2212.14034)."""

    objective = "mlm"  # what the training loop holds the batches to
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ClearheadConfig, **unknown: Any) -> None:
        if config.direction != "bidirectional":
            raise ClearheadError(
                f"with direction={config.direction!r} a hidden token would be predicted from what "
                "comes before it alone: choose direction='bidirectional', or ClearheadForCausalLM"
            )
        super().__init__(config, **unknown)
        self.model = ClearheadModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **arguments: Any,
    ) -> MaskedLMOutput:
        """Logits [B, T, vocabulary], and the loss where labels are given.

        Args:
            labels: int64 [B, T], the token that was at each hidden place and −100 at all others,
                which are not predicted. The loss is the mean over the hidden places.
            num_items_in_batch: divides the summed loss instead of their number.
            **arguments: as in `ClearheadModel.forward`, as are those above that are not explained.

        In training with labels, `logits` is None: hidden states are gathered at the labelled places
        before the head, and the loss is made by chunks (`ops.linear_cross_entropy`).
        """
        out = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            document_ids=document_ids,
            return_dict=True,
            **arguments,
        )
        x = out.last_hidden_state
        loss, called = None, False
        if labels is not None:
            mean_from = 0 if num_items_in_batch is None else None
            check_labels(labels, x, self.config.vocab_size, mean_from)
            x, weight = read_by(self.lm_head, x)
            called = weight is None
            x_ND, target_N = x.flatten(0, 1), labels.flatten()
            # A GPU is waited for once, to learn their number; a mask as index would cost two.
            (hidden_N,) = (target_N != IGNORED).nonzero(as_tuple=True)
            x_ND, target_N = (each.index_select(0, hidden_N) for each in (x_ND, target_N))
            count = num_items_in_batch
            count = (target_N != IGNORED).sum() if count is None else count
            loss = summed_loss(x_ND, weight, target_N) / count
        logits = None
        if labels is None or not self.training:
            logits = x if called else self.lm_head(x)
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )
