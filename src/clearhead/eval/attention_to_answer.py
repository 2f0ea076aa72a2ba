"""Shares of attention on the answer and on noise (arXiv 2410.05258, table 3).

The last token of a needle prompt, which should find the number, attends to the needle asked for
(`answer`), to all other text before the question, other needles included (`noise`), and to the
begin token and the question itself (`other`). Weights are summed over the span, all heads and all
layers, and divided by a sum over all keys, heads and layers. The paper does not say which; here are
both, the same for a softmax map:

- `signed`: the weights as they are, over their sum. Of a difference of maps that sum is 1 − λ a
  row, so shares add up to 1, but one may be negative and another above 1.
- `absolute`: |weights| over the sum of |weights|: shares of all that moves the output.

`lift` is the absolute share of the answer over its share of the visible tokens: 1 is no preference.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from clearhead.data.seeded_choices import SeededChoices
from clearhead.eval.needles import Haystack, haystack
from clearhead.eval.options import AllocationOptions
from clearhead.eval.task import EvalTask, by_depth, check_count
from clearhead.measure.answers import Prompt
from clearhead.measure.task import Advanced, Cell, Subject
from clearhead.models.inspection import evaluating
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.observation import observe
from clearhead.probe.tiles import AttentionTile, ByTile
from clearhead.records.runs import Line

SPANS = ("answer", "noise", "other")


class AllocationTask(EvalTask, AllocationOptions):
    headlines = ("answer_share", "noise_share")

    def cells(self, subject: Subject) -> list[Cell]:
        check_count(samples=self.samples)
        cells = by_depth(subject.lengths, self.depths)
        for length in subject.lengths:
            self._haystack(subject, {"length": length, "depth": 0.0}, 0)
            subject.check_length(length)
        return cells

    def result(self, subject: Subject, cell: Cell, advanced: Advanced) -> Line:
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, 3, dtype=torch.float64))
        counts = torch.zeros(3, dtype=torch.float64)
        for sample in range(self.samples):
            stack = self._haystack(subject, cell, sample)
            (prompt,) = stack.prompts
            spans = _spans(stack, prompt, len(subject.begin))
            counts += spans.sum(1)
            for name, found in last_row(subject, prompt, spans).items():
                sums[name] += found
            advanced(1)
        tokens = (counts / counts.sum()).tolist()
        *_, effective = sums.values()  # what multiplies the values comes last
        share = (effective[1] / effective[1].sum()).tolist()
        return {
            "answer_share": share[0],
            "noise_share": share[1],
            "maps": [
                {
                    "map": name,
                    "signed": dict(zip(SPANS, (one[0] / one[0].sum()).tolist(), strict=True)),
                    "absolute": dict(zip(SPANS, (one[1] / one[1].sum()).tolist(), strict=True)),
                    "lift": float(one[1, 0] / one[1].sum()) / tokens[0],
                }
                for name, one in sums.items()
            ],
            "token_shares": dict(zip(SPANS, tokens, strict=True)),
            "samples": self.samples,
        }

    def _haystack(self, subject: Subject, cell: Cell, sample: int) -> Haystack:
        label = f"allocation {subject.seed} {cell['length']} {sample}"
        options: Any = {"needles": self.needles, "digits": self.digits, "filler": self.filler}
        return haystack(subject, SeededChoices(label), queries=1, **cell, **options)


def last_row(subject: Subject, prompt: Prompt, spans_3S: Tensor) -> dict[str, Tensor]:
    """Attention of a prompt's last token, by map, summed over heads and layers.

    The prompt is read but for its last token, and only that one is observed.

    Args:
        spans_3S: bool, for each of the spans the keys in it.

    Returns:
        Float64 [2, 3]: signed and absolute weights, over the spans.
    """
    last_row = _LastRow(spans_3S)
    with evaluating(subject.model):
        batch = subject.reader.read([prompt])
        with observe(subject.model, attention=[ByTile(weights=[last_row])]):
            subject.reader.forward(batch)
    return dict(last_row.sums)


class _LastRow:
    def __init__(self, spans_3S: Tensor) -> None:
        self._spans_S3 = spans_3S.double().T
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, 3, dtype=torch.float64))

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        if tile.start + tile.visible.shape[2] < call.q.shape[2]:
            return
        for part in tile.maps:
            row_HS = part.weights[0, :, -1].double().cpu()
            both = torch.stack([row_HS, row_HS.abs()]).sum(1)
            self.sums[part.name] += both @ self._spans_S3

    def measures(self) -> list[dict[str, Any]]:
        return []


def _spans(stack: Haystack, prompt: Prompt, begin: int) -> Tensor:
    answer_S = torch.zeros(len(prompt.ids), dtype=torch.bool)
    start, stop = stack.spans[stack.asked[0].city]
    answer_S[start:stop] = True
    other_S = torch.zeros_like(answer_S)
    other_S[:begin] = True
    other_S[len(prompt.context) :] = True
    return torch.stack([answer_S, ~(answer_S | other_S), other_S])
