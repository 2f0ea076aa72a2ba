"""Models with a head: for the next token, for hidden tokens, and for classes of texts."""

from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import GenerationMixin
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils import can_return_tuple

from clearhead import ops
from clearhead.errors import ClearheadError
from clearhead.models.base_model import CACHE, ClearheadModel, ClearheadPreTrainedModel
from clearhead.models.caches import PrefixCache, steps_on_device
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.inputs import Options, check_below
from clearhead.ops.precision import has_numbers, readable

IGNORED = -100  # a label that no loss is taken of
WIDTH = 1024  # of a classifier's hidden layer, whatever the trunk's, as in the crammed BERT
REGRESSION, CLASSES = "regression", "single_label_classification"


def check_labels(labels: Tensor, x_BTC: Tensor, vocabulary: int, mean_from: int | None) -> None:
    """Refuse labels that are not int64 [B, T], below `vocabulary` or −100 (no loss there); and a
    mean over none from index `mean_from` on."""
    if labels.shape != x_BTC.shape[:2] or labels.dtype != torch.int64:
        found = f"{labels.dtype} {list(labels.shape)}"
        raise ClearheadError(f"labels must be int64 {list(x_BTC.shape[:2])}; found {found}")
    if readable(labels):
        outside = (labels >= vocabulary) | ((labels < 0) & (labels != IGNORED))
        if bool(outside.any()):
            raise ClearheadError(
                f"label {int(labels[outside][0])} is outside the vocabulary, 0 to {vocabulary - 1}"
            )
        if mean_from is not None and not bool((labels[:, mean_from:] != IGNORED).any()):
            raise ClearheadError(f"every label is {IGNORED}: there is no loss to take the mean of")


def loss_inputs(head: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """(x, the head's weight) for a plain linear head; otherwise (logits, None): under adapters,
    quantised, with a bias, pruned, with hooks, or with a `forward` of its own (accelerate's)."""
    weight = head._parameters.get("weight")
    plain = type(head) is nn.Linear and head.bias is None and "forward" not in vars(head)
    hooks = head._forward_hooks, head._forward_pre_hooks, head._backward_hooks
    hooked = any((*hooks, head._backward_pre_hooks)) or _has_any_global_hook()
    if plain and not hooked and type(weight) in (nn.Parameter, Tensor):
        return x, weight
    return head(x), None


class TokenLoss(nn.Module):
    """Mean −log p of labels, each of the token itself or, `shifted`, of its predecessor; a module,
    so that the shifted one can be compiled like a layer."""

    def __init__(self, shifted: bool) -> None:
        super().__init__()
        self.shifted = self.compile_like_a_layer = shifted  # `clearhead.train.compiling` reads it

    def forward(
        self, x_BTC: Tensor, weight_VC: Tensor | None, labels_BT: Tensor, count: Tensor | int | None
    ) -> Tensor:
        """Float32 scalar, at least; x are logits without a weight, and `count` divides the sum in
        place of the number of labels."""
        if self.shifted:
            labels_BT = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)
        x_ND, target_N = x_BTC.flatten(0, 1), labels_BT.flatten()
        if not self.shifted:
            # A GPU is waited for once, to learn their number; a mask as index would cost two.
            (labelled_N,) = (target_N != IGNORED).nonzero(as_tuple=True)
            x_ND, target_N = (each.index_select(0, labelled_N) for each in (x_ND, target_N))
        if weight_VC is not None:
            total = ops.linear_cross_entropy(x_ND, weight_VC, target_N, ignore_index=IGNORED)
        else:
            x_ND = x_ND.to(torch.promote_types(x_ND.dtype, torch.float32))
            target_N = target_N.to(x_ND.device)
            total = F.cross_entropy(x_ND, target_N, ignore_index=IGNORED, reduction="sum")
        return total / ((target_N != IGNORED).sum() if count is None else count)


class LanguageModel(ClearheadPreTrainedModel):
    """The trunk and an output head, tied to the embedding unless `tie_word_embeddings` is False."""

    objective: ClassVar[str]  # that the training loop requires of batches
    direction: ClassVar[str]  # that it requires
    output: ClassVar[type[Any]]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ClearheadConfig, **unknown: Any) -> None:
        if config.direction != self.direction:
            raise ClearheadError(f"{type(self).__name__} needs direction={self.direction!r}")
        super().__init__(config, **unknown)
        self.model = ClearheadModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss = TokenLoss(shifted=self.direction == "causal")
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Logits [B, T, vocabulary], and the loss where labels are given.

        Args:
            labels: int64 [B, T]. For a causal model input_ids again: the model shifts them. For a
                masked model the original token at each hidden place. −100 is not counted.
            logits_to_keep: number of last positions that get logits, 0 for all; or their indices.
            num_items_in_batch: divides the summed loss instead of the count of labels.
            **options: `clearhead.models.inputs.Options`; the others are those of `ClearheadModel`.

        In training with labels, `logits` is None: the loss is made by chunks that never hold
        [B, T, vocabulary] (`ops.linear_cross_entropy`).
        """
        options["return_dict"] = True
        out = self.model(input_ids, attention_mask, position_ids, document_ids, **options)
        x = out.last_hidden_state
        loss, logits, has_logits = None, None, False
        if labels is not None:
            first = 1 if self.direction == "causal" else 0  # label that counts
            mean_from = first if num_items_in_batch is None else None
            check_labels(labels, x, self.config.vocab_size, mean_from)
            x, weight = loss_inputs(self.lm_head, x)
            has_logits = weight is None
            loss = self.loss(x, weight, labels, num_items_in_batch)
        if labels is None or not self.training:
            last = logits_to_keep
            x = x[:, last if isinstance(last, Tensor) else slice(-last, None)]
            logits = x if has_logits else self.lm_head(x)
        return self.output(
            loss=loss,
            logits=logits,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            **({CACHE: getattr(out, CACHE)} if self.direction == "causal" else {}),
        )


class ClearheadForCausalLM(LanguageModel, GenerationMixin):
    """A causal language model."""

    objective, direction, output = "next-token", "causal", CausalLMOutputWithPast

    def create_masks_for_generate(
        self,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor,
        past_key_values: Any = None,
        cache: Any = None,
        **unused: Any,
    ) -> Tensor | None:
        """transformers' hook: returns a mask [B, S] in place of the default [B, 1, T, S]."""
        cache = past_key_values if cache is None else cache
        tokens, windowed = inputs_embeds.shape[1], self.model.windowed
        if attention_mask is None or not steps_on_device(cache, tokens, windowed):
            return attention_mask
        spare = cache.get_max_length() - attention_mask.shape[1]
        return F.pad(attention_mask, (0, max(spare, 0)))

    def generate(self, *inputs: Any, **options: Any) -> Any:
        """transformers' `generate`. A model with a prefix makes its own cache if none is named."""
        own = self.generation_config
        config = options.get("generation_config") or next(iter(inputs[1:]), None) or own
        if "assistant_early_exit" in options or config.assistant_early_exit is not None:
            raise ClearheadError("assistant_early_exit is not supported: give an assistant_model")
        named = {"past_key_values", "cache", "use_cache", "cache_implementation"} & options.keys()
        fixed = any(one.use_cache is False or one.cache_implementation for one in (config, own))
        if self.model.prefix_length and not (named or fixed or config.is_assistant):
            options[CACHE] = PrefixCache(config=self.config)
        return super().generate(*inputs, **options)

    def init_continuous_batching(self, *arguments: Any, **options: Any) -> Any:
        """transformers' hook, refused: its paged cache has one shape for all layers and heads."""
        raise ClearheadError(
            "continuous batching is for the form that `clearhead convert --for serving` writes"
        )


class ClearheadForMaskedLM(LanguageModel):
    """Predicts each token from the whole text; the head has no transform or bias before it, as in
    the crammed BERT (arXiv 2212.14034)."""

    objective, direction, output = "mlm", "bidirectional", MaskedLMOutput


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
    crammed BERT's pooler does ("zero_index"); in a causal model the last token's. Padding does not
    count as first or last.
    """

    objective = "classification"

    def __init__(self, config: ClearheadConfig, **unknown: Any) -> None:
        super().__init__(config, **unknown)
        kind = config.problem_type or (REGRESSION if config.num_labels == 1 else CLASSES)
        if kind not in (REGRESSION, CLASSES) or (kind == REGRESSION and config.num_labels != 1):
            raise ClearheadError(
                f"problem_type is {kind!r}, with num_labels={config.num_labels}: choose {CLASSES}, "
                f"or {REGRESSION} with num_labels=1"
            )
        self.problem = kind
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
        pad, ids = self.config.pad_token_id, input_ids
        reads = attention_mask is None and ids is not None and has_numbers(ids)
        if reads and pad is not None and bool((ids == pad).any()):  # type: ignore[union-attr]
            raise ClearheadError(f"there are pad tokens ({pad}) but no attention_mask")
        options["use_cache"], options["return_dict"] = options.get("use_cache") or False, True
        out = self.model(input_ids, attention_mask, **options)
        x_BTC = out.last_hidden_state
        (batch, length), causal = x_BTC.shape[:2], self.config.direction == "causal"
        place_BT = torch.arange(length, device=x_BTC.device).expand(batch, -1)
        if attention_mask is not None:  # padding is neither first nor last
            place_BT = place_BT.where(attention_mask.bool(), 0 if causal else length - 1)
        read_B = place_BT.amax(-1) if causal else place_BT.amin(-1)
        row_B = torch.arange(batch, device=x_BTC.device)
        logits_BN = self.classifier(x_BTC[row_B, read_B])
        loss = None
        if labels is not None:
            wide_BN = logits_BN.float()
            if self.problem == REGRESSION:
                target_BN = labels.float().view_as(wide_BN)
                total = F.mse_loss(wide_BN, target_BN, reduction="sum")
            else:
                check_below(wide_BN.shape[-1], labels, "labels", "the classes")
                total = F.cross_entropy(wide_BN, labels.flatten(), reduction="sum")
            loss = total / (batch if num_items_in_batch is None else num_items_in_batch)
        return SequenceClassifierOutput(
            loss=loss,  # type: ignore[arg-type]
            logits=logits_BN,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )
