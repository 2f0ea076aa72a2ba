"""The keys that each query sees: one value for kernels, means, probes and costs."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.ops.precision import is_exporting


class Span(NamedTuple):
    """Queries `start` to `stop`, and `first` to `end`, all keys that any of them may see."""

    start: int
    stop: int
    first: int
    end: int


class Visibility(NamedTuple):
    """The keys that each of T queries sees, the last of S keys: keywords of `ops.attend`."""

    causal: bool = True  # query i sees the keys up to S − T + i
    window: int | None = None  # and only those less than so many places away
    key_mask: Tensor | None = None  # bool [B, S], False for padding
    segments: Tensor | None = None  # int [B, S]; a query sees the keys of its own segment

    @property
    def masked(self) -> bool:
        """True where a mask or segments hide keys."""
        return self.key_mask is not None or self.segments is not None

    def settled(self, queries: int, keys: int) -> "Visibility":
        """The same visibility without a `causal` or `window` that hides none of these keys."""
        bites = self.window is not None and (is_exporting() or self.window < keys)
        # A condition: under torch.compile a comparison of lengths need be no constant.
        several = True if queries > 1 or bites else False  # noqa: SIM210
        causal = self.causal and several  # a lone query is the last
        window = self.window if bites else None
        return Visibility(causal, window, self.key_mask, self.segments)

    def earliest(self, queries: int, keys: int) -> int:
        """The first key that any query may see."""
        if self.window is None or is_exporting():
            return 0
        return max(0, keys - queries - self.window + 1)

    def of_keys(self, first: int) -> "Visibility":
        """The visibility of the keys from `first` on."""
        if first == 0:
            return self
        masks = (self.key_mask, self.segments)
        key_mask, segments = (m if m is None else m[:, first:] for m in masks)
        return self._replace(key_mask=key_mask, segments=segments)

    def spans(self, queries: int, keys: int, rows: int) -> Iterator[Span]:
        """Spans of at most `rows` queries, with their keys; one in an exported program."""
        if is_exporting():
            yield Span(0, queries, 0, keys)
            return
        before = keys - queries
        for start in range(0, queries, rows):
            stop = min(start + rows, queries)
            reach = 1 if self.causal else self.window
            first = self.earliest(queries - start, keys)
            end = keys if reach is None else min(keys, before + stop - 1 + reach)
            yield Span(start, stop, first, end)

    def hidden(
        self, span: Span, queries: int, keys: int, device: torch.device | None
    ) -> Tensor | None:
        """True where a query does not see a key, [B or 1, 1, rows, keys]; None: it sees all."""
        start, stop, first, end = span
        hidden = None
        if self.causal or self.window is not None:
            own = torch.arange(start, stop, device=device)[:, None] + (keys - queries)
            key = torch.arange(first, end, device=device)[None, :]
            last = own if self.causal else own + (self.window or 0) - 1
            hidden = key > last
            if self.window is not None:
                hidden = hidden | (key <= own - self.window)
            hidden = hidden[None, None]
        if self.key_mask is not None:
            padding = ~self.key_mask[:, None, None, first:end]
            hidden = padding if hidden is None else hidden | padding
        if self.segments is not None:
            own = self.segments[:, -queries:][:, start:stop]
            other = own[:, None, :, None] != self.segments[:, None, None, first:end]
            hidden = other if hidden is None else hidden | other
        return hidden

    def mean_count(self, length: int) -> float:
        """Keys that a token sees on average in a text of `length`, padding and documents aside."""
        if not self.causal:
            if self.window is None:
                return float(length)
            return 2 * self._replace(causal=True).mean_count(length) - 1  # its own key once
        window = length if self.window is None else min(self.window, length)
        return ((window + 1) / 2 * window + (length - window) * window) / length
