"""The demo: small models that show defects and what repairs do to them, in minutes on two cores."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clearhead.data import Corpus, DataConfig, prepare, windows
from clearhead.experiments.compare import compare, folder_of
from clearhead.experiments.configs import RECORDS, CompareConfig
from clearhead.experiments.diagnosing import run_diagnosis
from clearhead.experiments.final_measures import states
from clearhead.experiments.quantization import run_quantization
from clearhead.experiments.run_setup import load_model
from clearhead.experiments.sweep_configs import DIAGNOSIS_FILE, DiagnoseConfig, QuantizeConfig
from clearhead.models.loading import kind_of, resolved
from clearhead.progress import Work
from clearhead.records import jsonl
from clearhead.records.files import write_text
from clearhead.train import TrainConfig
from clearhead.train.run_dir import FINAL

SCHEME = "w8a8-coarse"  # 8 bits, a scale for each whole tensor: what outliers ruin
_SEEDS = (0, 1, 2)
_READ = 64  # beginnings of documents


@dataclass(frozen=True, kw_only=True)
class Studies:
    """The comparisons of the demo."""

    text: CompareConfig
    """Blocks and positions on ordinary text, read beyond the training length."""
    sinks: CompareConfig
    """Remedies for the sink, on a made text that grows one."""

    @property
    def units(self) -> int:
        """Runs of both."""
        return sum(len(one.seeds) * len(one.arms) for one in (self.text, self.sinks))


def studies(output: Path) -> Studies:
    """The demo's own: 250 to 300 CPU-seconds.

    Rates are not tuned. At 1e-2 the made text grows its sink within 200 steps.
    """
    text = CompareConfig(
        presets=("transformer", "sas-p", "alibi", "coca"),
        # Attention is learnt sooner from matrices that keep the size of what they read.
        set={
            **_shape(hidden_size=128, num_hidden_layers=4, num_attention_heads=4),
            "initializer_range": 0.07,
        },
        seeds=_SEEDS,
        lengths=(1, 2, 4, 8, 16),
        evaluation_tokens=16_384,
        train=TrainConfig(tokens=200_000, sequence_length=64, batch_size=16, learning_rate=3e-3),
        data=DataConfig(vocabulary=1024, limit=4_000_000, validation=0.05),
        output=output / "text",
    )
    sinks = CompareConfig(
        presets=("transformer", "softmax1", "key-bias", "gated"),
        set=_shape(hidden_size=64, num_hidden_layers=2, num_attention_heads=2),
        seeds=_SEEDS,
        lengths=(1,),
        evaluation_tokens=8192,
        train=TrainConfig(
            tokens=409_600,
            sequence_length=64,
            batch_size=32,
            learning_rate=1e-2,
            document_masks=True,
        ),
        data=DataConfig(data=("synthetic:backcopy:documents=8000,characters=360",), vocabulary=512),
        output=output / "sinks",
    )
    return Studies(text=text, sinks=sinks)


def _shape(**keys: int) -> dict[str, Any]:
    return {**keys, "max_position_embeddings": 64}


def run_demo(
    asked: Studies,
    output: Path,
    *,
    pretrained: str | None,
    trust_remote_code: bool,
    say: Callable[[str], None],
    work: Work,
) -> dict[str, Path]:
    """Train and measure everything; return the records of each part: text, sinks, bits and, of a
    pretrained model, diagnosis and pretrained bits.

    What is done is kept, and the same call goes on where it stopped.

    Raises:
        ClearheadError: for a model that cannot be loaded, and as `compare` does.
        InterruptedRun: after SIGINT or SIGTERM, once the run at hand has saved.
    """
    work.start(asked.units + 2 + (pretrained is not None))
    found: dict[str, Path] = {}
    if pretrained is not None:  # a name that leads nowhere is better known before the training
        kind_of(resolved(pretrained), trust_remote_code=trust_remote_code)
    compare(asked.text, say=say, work=work)
    work.begin("the models in 8 bits")
    found["text"] = asked.text.output / RECORDS
    baselines = [str(folder) for folder in _folders(asked.text, asked.text.presets[:1])]
    if baselines:
        text = replace(asked.text.data, vocabulary=DataConfig.vocabulary)  # each has its tokenizer
        found["bits"] = _quantized(tuple(baselines), output / "bits.jsonl", text, False, say)
    work.end()
    compare(asked.sinks, say=say, work=work)
    work.begin("the first token's attention")
    lines = _sinks(asked.sinks, prepare(asked.sinks.data))
    found["sinks"] = output / "sinks.jsonl"
    write_text(found["sinks"], "".join(map(jsonl.encode, lines)))
    work.end()
    if pretrained is not None:
        work.begin(pretrained)
        text = DataConfig(limit=1_000_000, validation=0.2)
        diagnosed = DiagnoseConfig(
            models=(pretrained,),
            output=output / "pretrained",
            data=text,
            windows=8,
            trust_remote_code=trust_remote_code,
        )
        run_diagnosis(diagnosed, say=say)
        found["diagnosis"] = diagnosed.output / DIAGNOSIS_FILE
        found["pretrained bits"] = _quantized(
            (pretrained,), output / "pretrained/bits.jsonl", text, trust_remote_code, say
        )
        work.end()
    return found


def _quantized(
    models: tuple[str, ...],
    records: Path,
    text: DataConfig,
    trust_remote_code: bool,
    say: Callable[[str], None],
) -> Path:
    """Records of models in full precision and in 8 bits."""
    asked = QuantizeConfig(
        models=models,
        scheme=(SCHEME,),
        length=256,
        tokens=4096,
        records=records,
        data=text,
        trust_remote_code=trust_remote_code,
    )
    run_quantization(asked, say=say)
    return records


def _folders(config: CompareConfig, presets: Iterable[str]) -> Iterator[Path]:
    """The folders of the runs of these presets that stayed finite, a seed after the other."""
    for seed in config.seeds:
        for arm in config.arms:
            folder = folder_of(config, arm, seed)
            if arm.preset in presets and (folder / FINAL).is_dir():
                yield folder


def _sinks(config: CompareConfig, corpus: Corpus) -> Iterator[dict[str, Any]]:
    """Attention at the beginnings of documents, where the begin token is: `compare` reads windows
    that begin anywhere."""
    length = config.train.sequence_length
    read = list(windows(corpus, length=length, count=_READ, at="documents"))
    for folder in _folders(config, config.presets):
        made, *lines = jsonl.read(folder / RECORDS)
        model, _ = load_model(str(folder), trust_remote_code=False)
        run, settings = {"run": made["run"]}, replace(config.train, seed=made["seed"])
        yield made
        yield from (line for line in lines if line.get("metric") == "perplexity")
        for found in states(model, read, settings, batch_size=len(read)):
            yield {"kind": "measure", **run, **found}
