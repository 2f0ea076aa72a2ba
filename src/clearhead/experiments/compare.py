"""The main job: the same tokens, in the same order, to every preset; then the same questions."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from clearhead.data import Corpus, DataConfig, prepare
from clearhead.errors import ClearheadError
from clearhead.experiments.building import batches, best_device, fitted
from clearhead.experiments.measures import attention_records, measure
from clearhead.models import ClearheadForCausalLM, plan, preset
from clearhead.report.records import Records, load
from clearhead.train import Callback, TrainConfig, TrainResult, is_finished, train
from clearhead.train.atomic import write_text

RECORDS = "records.jsonl"


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """A comparison: which models, on what, for how long."""

    presets: tuple[str, ...] = ("transformer", "differential", "softmax1")
    """Presets to train; the first that is `transformer` is what the others are judged by."""
    size: str = "tiny"
    """Size of the presets: tiny or small."""
    seeds: tuple[int, ...] = (0,)
    """One run a preset for each; a seed fixes initial weights and the order of the data."""
    output: Path = Path("runs/compare")
    """Folder of the runs, records and report; the same command goes on where it stopped."""
    lengths: tuple[int, ...] = (1, 2, 4, 8)
    """Perplexity is measured at these multiples of the training length."""
    evaluation_tokens: int = 65_536
    """Validation tokens read at each length."""
    rates: dict[str, float] = field(default_factory=dict)
    """A learning rate of its own for a preset, where one was tuned."""
    label: str = ""
    """Names the records on a report that shows several sets; empty for a run just made."""
    train: TrainConfig = field(default_factory=lambda: TrainConfig(learning_rate=3e-3))
    """Training, the same for every preset; the learning rate is the best of three at `tiny`."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text, tokenizer and split."""

    def __post_init__(self) -> None:
        for name in ("presets", "seeds", "lengths"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                found = " ".join(map(str, values)) or "none"
                raise ClearheadError(f"{name} must be one or more, each once; found {found}")
        if min(self.lengths) < 1 or self.evaluation_tokens < 1:
            raise ClearheadError("lengths and evaluation_tokens must be whole numbers above 0")
        for name in self.presets:
            preset(name, self.size)  # refuses what is unknown before anything is read or written
        for name in self.rates:
            if name not in self.presets:
                raise ClearheadError(
                    f"rates names {name!r}, which is not compared: compared are "
                    f"{', '.join(self.presets)}"
                )


class InterruptedRun(Exception):  # noqa: N818 (a request, not a fault)
    """A signal stopped a run; its checkpoint is kept and the same command goes on from it."""

    def __init__(self, result: TrainResult) -> None:
        super().__init__("interrupted")
        assert result.stop_signal is not None
        self.code = 128 + result.stop_signal


def compare(
    config: CompareConfig,
    *,
    say: Callable[[str], None],
    callbacks: Callable[[], list[Callback]] = list,
) -> Records:
    """Train and measure every preset with every seed, and return the records.

    What is done is kept in `config.output`, a folder a run, so that a comparison that was stopped
    goes on with the run at hand. `records.jsonl` there holds the records of all runs.

    Raises:
        ClearheadError: for settings or data that do not work, or a folder of other settings.
        InterruptedRun: after SIGINT or SIGTERM, once the run at hand has saved.
    """
    corpus = prepare(config.data, progress=say)
    device = best_device()
    written = []
    for seed, name in ((seed, name) for seed in config.seeds for name in config.presets):
        folder = config.output / f"{name}-seed{seed}"
        records = folder / RECORDS
        header = _header(config, corpus, name, seed)
        if records.exists():
            _check_same(records, header)
            say(f"{name}, seed {seed}: already done")
        else:
            say(f"{name}, seed {seed}: {header['parameters']:,} parameters")
            lines = _run(config, corpus, header, folder, device, callbacks())
            write_text(records, "".join(_serialised(lines)))
        written.append(records)
        text = "".join(path.read_text("utf-8") for path in written)
        write_text(config.output / RECORDS, text)
    return load(config.output / RECORDS)


def _header(config: CompareConfig, corpus: Corpus, name: str, seed: int) -> dict[str, Any]:
    """The run's own line of the records; what a training run adds to it comes later."""
    rate = config.rates.get(name, config.train.learning_rate)
    settings = replace(config.train, seed=seed, learning_rate=rate)
    model = fitted(name, config.size, corpus, settings)
    counts = plan(model)
    return {
        "kind": "run",
        "run": f"{name}/seed{seed}",
        "preset": name,
        "size": config.size,
        "seed": seed,
        "label": config.label,
        "model": model.to_diff_dict(),
        "train": asdict(settings),
        "data": corpus.describe(),
        "parameters": counts.parameters,
        "non_embedding_parameters": counts.non_embedding_parameters,
        "lengths": [multiple * settings.sequence_length for multiple in config.lengths],
        "evaluation_tokens": config.evaluation_tokens,
    }


def _run(
    config: CompareConfig,
    corpus: Corpus,
    header: dict[str, Any],
    folder: Path,
    device: torch.device,
    callbacks: list[Callback],
) -> Iterator[dict[str, Any]]:
    """Train one model, or go on with it; then ask it everything. Yields its records."""
    settings = TrainConfig(**header["train"])
    seed, name = header["seed"], header["run"]
    torch.manual_seed(seed)
    model = ClearheadForCausalLM(fitted(header["preset"], config.size, corpus, settings)).to(device)
    measures: dict[str, Any] = {}
    if is_finished(folder):  # trained, but stopped before it was measured
        model = ClearheadForCausalLM.from_pretrained(folder / "final").to(device)
        measures = {"reason": "the process that trained it was stopped before the measurements"}
    else:
        result = train(
            model,
            batches(corpus, settings),
            settings,
            output=folder,
            tokenizer=corpus.tokenizer,
            resume=folder.exists(),
            callbacks=callbacks,
            description={"run": name},
        )
        if result.stop_signal is not None:
            raise InterruptedRun(result)
        measures = {
            "train_seconds": result.seconds,
            "tokens_per_second": result.tokens_per_second,
            "peak_memory_bytes": result.peak_memory_bytes,
        }
    made = json.loads((folder / "run.json").read_text("utf-8"))
    yield header | {key: made[key] for key in ("versions", "device", "command", "date")}
    for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines():
        yield json.loads(line) | {"kind": "step", "run": name}
    for metric in ("train_seconds", "tokens_per_second", "peak_memory_bytes"):
        value = measures.get(metric)
        reason = {} if value is not None else {"reason": measures["reason"]}
        yield {"kind": "measure", "run": name, "metric": metric, "value": value, **reason}
    measured = measure(
        model,
        corpus,
        length=settings.sequence_length,
        lengths=header["lengths"],
        tokens=config.evaluation_tokens,
    )
    for found in measured:
        yield {"kind": "measure", "run": name, **found}
    if seed == config.seeds[0]:
        for found in attention_records(model, corpus):
            yield {"kind": "attention", "run": name, **found}


def _serialised(records: Iterator[dict[str, Any]]) -> Iterator[str]:
    return (json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _check_same(path: Path, header: dict[str, Any]) -> None:
    """Refuse a folder whose finished run was made with other settings."""
    found = json.loads(path.read_text("utf-8").splitlines()[0])
    wanted = json.loads(json.dumps(header))
    for key in ("size", "model", "train", "lengths", "evaluation_tokens"):
        if found[key] != wanted[key]:
            different = key
            if isinstance(wanted[key], dict):
                changed = [k for k in wanted[key] if found[key].get(k) != wanted[key][k]]
                different = f"{key}: {', '.join(changed)}"
            raise ClearheadError(
                f"{path.parent} holds a run of other settings ({different}): "
                "choose another output folder, or the settings of that run"
            )
    if found["data"].get("fingerprint") != wanted["data"].get("fingerprint"):
        raise ClearheadError(f"{path.parent} holds a run on other data: choose another output")
