"""Rewrite a checkpoint of an older clearhead's single process in the present format, in place.

    python tools/migrate_checkpoint.py RUN/checkpoints/step-00000100 ...

The older format has model.safetensors, or adapter_model.safetensors, and optimizer.safetensors.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from clearhead.errors import ClearheadError
from clearhead.models.loading import auto_class, kind_of, pretrained
from clearhead.records import manifest
from clearhead.records.files import publish_folder
from clearhead.train import checkpoint

OPTIMIZER = "optimizer.safetensors"
ADAPTER = "adapter_model.safetensors"
REPLACED = ("model.safetensors", OPTIMIZER, ADAPTER, checkpoint.TRAINER_FILE)


def migrate(folder: Path) -> None:
    """Put a checkpoint of the present format in place of one of the older."""
    if not (folder / OPTIMIZER).exists():
        raise ClearheadError(f"{folder} is no checkpoint of the older format: nothing was changed")
    record = manifest.verify(folder, name=checkpoint.TRAINER_FILE, advice="nothing was changed")
    state = {
        {"random": f"{name}/0", "buffers": name.replace("buffers/", checkpoint.WEIGHTS)}.get(
            name.partition("/")[0], name
        ): tensor
        for name, tensor in load_file(folder / OPTIMIZER).items()
    }
    if (folder / ADAPTER).exists():
        for name, tensor in load_file(folder / ADAPTER).items():
            place = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
            state[checkpoint.WEIGHTS + place] = tensor
    else:
        kind = auto_class(kind_of(str(folder)))
        state |= checkpoint.weights(pretrained(kind, folder, dtype=torch.float32))
    earlier = folder.with_name(f"earlier-{folder.name}")
    with publish_folder(folder.with_name(f"migrated-{folder.name}")) as made:
        for path in folder.iterdir():
            if path.name not in REPLACED:
                shutil.copy(path, made)
        checkpoint.write_state(made, state)
        kept = {key: value for key, value in record.items() if key != "files"}
        manifest.seal(made, kept, name=checkpoint.TRAINER_FILE)
    folder.rename(earlier)
    folder.with_name(f"migrated-{folder.name}").rename(folder)
    shutil.rmtree(earlier)


def main(folders: list[str]) -> int:
    """Migrate every folder; 0, or 2 for what cannot be migrated."""
    try:
        for folder in folders:
            migrate(Path(folder))
    except ClearheadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
