"""The demo: small models that show defects and what repairs do to them, in minutes on two cores."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.data import DataConfig, prepare, windows
from clearhead.diagnose import RowMeans
from clearhead.diagnose.means import Means
from clearhead.lab.compare import compare, folder_of
from clearhead.lab.configs import RECORDS, CompareConfig
from clearhead.lab.converting import run_conversion
from clearhead.lab.measuring import measure
from clearhead.lab.runs import load_model
from clearhead.lab.sweep_configs import ConvertConfig, DiagnoseConfig, QuantizeConfig
from clearhead.models.loading import kind_of, resolved
from clearhead.named_models import BASELINE
from clearhead.probe import AttentionCall, AttentionTile, ByTile
from clearhead.probe import measure as measure_inside
from clearhead.progress import Work
from clearhead.records import jsonl
from clearhead.records.files import write_text
from clearhead.records.runs import Line
from clearhead.train import TrainConfig
from clearhead.train.run_dir import FINAL

REPAIRED = "repaired"
SCHEMES = ("w8a8-coarse", "w6a6-coarse", "w4a4-coarse")  # a scale for each whole tensor
_READ = 64  # beginnings of documents

Studies = tuple[CompareConfig, CompareConfig]


def studies(output: Path) -> Studies:
    """Blocks and positions on ordinary text; remedies for sinks and noise on synthetic text, where
    at a rate of 1e-2 a sink forms within 400 steps. Learning rates are not tuned."""

    def shape(width: int, layers: int, heads: int) -> dict[str, Any]:
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
        return {**sizes, "max_position_embeddings": 64}

    window: Any = {"sequence_length": 64}
    text = CompareConfig(
        presets=("transformer", "sas-p", "alibi", "coca"),
        # Attention is learnt sooner from matrices that keep the size of what they read.
        set={**shape(128, 3, 4), "initializer_range": 0.07},
        seeds=(0, 1, 2),
        lengths=(1, 2, 4, 8, 16),
        evaluation_tokens=8192,
        train=TrainConfig(tokens=98_304, batch_size=8, learning_rate=3e-3, **window),
        data=DataConfig(vocabulary=1024, limit=4_000_000, validation=0.05),
        output=output / "text",
    )
    window["document_masks"] = True
    sinks = CompareConfig(
        presets=("transformer", "softmax1", "gated", "differential", "differential-v2"),
        set=shape(64, 2, 2),
        seeds=(0, 1, 2),
        lengths=(1,),
        evaluation_tokens=8192,
        train=TrainConfig(tokens=215_040, batch_size=8, learning_rate=1e-2, **window),
        data=DataConfig(data=("synthetic:backcopy:documents=8000,characters=360",), vocabulary=512),
        output=output / "sinks",
    )
    return text, sinks


def run_demo(
    comparisons: Studies,
    output: Path,
    *,
    pretrained: str | None,
    trust_remote_code: bool,
    work: Work,
) -> dict[str, Path]:
    """Train, repair and measure all, or go on; return the records of each part."""
    text, sinks = comparisons
    bits = partial(QuantizeConfig, scheme=SCHEMES, tokens=4096)
    work.start(
        sum(len(one.seeds) * len(one.arms) for one in comparisons) + 2 + (pretrained is not None)
    )
    if pretrained is not None:  # a name that leads nowhere is better known before the training
        kind_of(resolved(pretrained), trust_remote_code=trust_remote_code)
    for one in comparisons:
        compare(one, work=work)
    records = {part: output / f"{part}.jsonl" for part in ("text", "sinks", "bits")}
    records["text"] = text.output / RECORDS
    work.begin("the attention")
    lines = list(_attention(sinks))
    write_text(records["sinks"], "".join(map(jsonl.encode, lines)))
    work.end()
    work.begin("few bits")
    if models := [one["path"] for one in lines if one.get("arm") in (BASELINE, REPAIRED)]:
        data = replace(sinks.data, vocabulary=DataConfig.vocabulary)  # each has its tokenizer
        length = 3 * sinks.train.sequence_length // 4  # room for the prefix
        measure(bits(models=tuple(models), data=data, length=length, records=records["bits"]))
    work.end()
    if pretrained is not None:
        work.begin(pretrained)
        data = DataConfig(limit=1_000_000, validation=0.2)
        given: Any = {"models": (pretrained,), "data": data, "trust_remote_code": trust_remote_code}
        inside = DiagnoseConfig(output=output / "pretrained", windows=8, **given)
        records["diagnosis"] = inside.records
        records["pretrained bits"] = inside.output / "bits.jsonl"
        measure(inside)
        measure(bits(length=256, records=records["pretrained bits"], **given))
        work.end()
    return records


def _attention(config: CompareConfig) -> Iterator[Line]:
    """Attention at the beginnings of documents, where the begin token is; of baselines also that of
    their repair."""
    corpus = prepare(config.data)
    read = list(windows(corpus, length=config.train.sequence_length, count=_READ, at="documents"))
    lines = jsonl.read(config.output / RECORDS)
    headers = {line["run"]: line for line in lines if line["kind"] == "run"}
    for seed, arm in itertools.product(config.seeds, config.arms):
        header = headers[f"{arm.name}/seed{seed}"]
        final = folder_of(config, arm, seed) / FINAL
        if header["diverged"]:
            continue
        header["path"] = str(final)
        yield dict(header)
        for line in lines:
            if line["run"] == header["run"] and line.get("metric") == "perplexity":
                yield {key: value for key, value in line.items() if key != "cell"}
        yield from _measured(header, read)
        if arm.preset != BASELINE:
            continue
        repair = ConvertConfig(  # the same function, without training
            model=header["path"],
            output=config.output / f"{REPAIRED}-seed{seed}",
            prefix=corpus.tokenizer.bos_token,
            rotate=("residual", "values", "down"),
            text=config.data.data[0],
            length=len(read[0]) // 2,
        )
        if not repair.output.is_dir():
            run_conversion(repair)
        header |= {"run": f"{REPAIRED}/seed{seed}", "arm": REPAIRED, "preset": REPAIRED}
        header["path"] = str(repair.output)
        yield header
        # The prefix stands in the place of the begin token.
        yield from _measured(header, [one[1:] for one in read])


def _measured(header: Line, read: Sequence[Tensor]) -> Iterator[Line]:
    model, _ = load_model(header["path"], trust_remote_code=False)
    attention = [ByTile(weights=[RowMeans(), CopiedShare(torch.stack([*read]))])]
    for line in measure_inside(model, read, batch_size=len(read), attention=attention):
        yield {"kind": "measure", "run": header["run"], **line}


class CopiedShare(Means):
    """`copied_share`: the share of absolute attention on the token that is to come again, at tokens
    after which the one before them always does; all else is noise (arXiv 2410.05258, table 3).
    `ids_BT`, int64, are all windows, which are read as one batch."""

    def __init__(self, ids_BT: Tensor) -> None:
        super().__init__()
        copies_BT = ids_BT[:, 2:] == ids_BT[:, :-2]
        middle_BT = ids_BT[:, 1:-1]
        others = middle_BT[~copies_BT].unique()
        self._asking_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
        self._asking_BT[:, 1:-1] = ~torch.isin(middle_BT, others)

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        weight_BHRS = tile.maps[-1].weights.abs()
        batch_N, row_N = self._asking_BT[:, tile.start :][:, : weight_BHRS.shape[2]].nonzero().T
        weight_NHS = weight_BHRS[batch_N, :, row_N]
        before_N = row_N + tile.start - 1
        copied_H = weight_NHS[torch.arange(len(row_N)), :, before_N].sum(0)
        self.add(call.layer, copied_H, weight_NHS.sum((0, 2)), metric="copied_share")
