"""Types of text settings by what they hold: the names that a command line's help gives them."""

from typing import Annotated

from tyro.constructors import PrimitiveConstructorSpec


def _called(metavar: str) -> PrimitiveConstructorSpec[str]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda text: [text],
    )


Benchmark = Annotated[str, _called("BENCHMARK")]
Change = Annotated[str, _called("PRESET|KEY=VALUE")]
Experiment = Annotated[str, _called("EXPERIMENT")]
Field = Annotated[str, _called("FIELD")]
File = Annotated[str, _called("FILE")]
Folder = Annotated[str, _called("FOLDER")]
Grid = Annotated[str, _called("NxR")]
Model = Annotated[str, _called("MODEL")]
Name = Annotated[str, _called("NAME")]
Number = Annotated[str, _called("NUMBER")]
Order = Annotated[str, _called("ORDER")]
Pair = Annotated[str, _called("KEY=VALUE")]
Parallel = Annotated[str, _called("ddp|fsdp")]
Pattern = Annotated[str, _called("PATTERN")]
Preset = Annotated[str, _called("PRESET")]
Scaling = Annotated[str, _called("SCALING")]
SchemeName = Annotated[str, _called("SCHEME")]
Size = Annotated[str, _called("SIZE")]
Source = Annotated[str, _called("SOURCE")]
TaskName = Annotated[str, _called("TASK")]
Text = Annotated[str, _called("TEXT")]
Url = Annotated[str, _called("URL")]
Variable = Annotated[str, _called("VARIABLE")]
