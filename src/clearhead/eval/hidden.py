"""The loss at hidden tokens of a masked language model, as an evaluation."""

from dataclasses import dataclass
from typing import Any, ClassVar

from clearhead.data import with_mask_token
from clearhead.data.masking import SHARE
from clearhead.errors import ClearheadError
from clearhead.eval.masked import masked_loss
from clearhead.eval.task import Advanced, Cell, Subject


@dataclass(frozen=True, kw_only=True)
class MaskedTask:
    """Loss at hidden tokens of held-out text, and the share of them found."""

    headlines: ClassVar[tuple[str, ...]] = ("masked_loss", "masked_accuracy")

    mask: float = SHARE
    """Share of the tokens hidden."""

    def cells(self, subject: Subject) -> list[Cell]:
        if not 0 < self.mask < 1:
            raise ClearheadError(f"mask is {self.mask}: a share of the tokens, above 0 and below 1")
        if subject.texts.splits != ("validation",):
            raise ClearheadError("masked reads the held-out documents only: leave split out")
        return [{"length": length} for length in subject.lengths]

    def measure(self, subject: Subject, cell: Cell, advanced: Advanced) -> dict[str, Any]:
        loss, accuracy = masked_loss(
            subject.model,
            with_mask_token(subject.texts.corpus),
            length=cell["length"],
            tokens=subject.tokens,
            share=self.mask,
        )
        return {
            "masked_loss": loss["value"],
            "masked_accuracy": accuracy["value"],
            "predicted_tokens": loss["predicted_tokens"],
        }
