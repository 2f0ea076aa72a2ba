"""The size of the package, its Python and its TOML: it goes down only."""

from pathlib import Path

import clearhead

LINES = 29_112
LONGEST = 400


def test_the_package_does_not_grow():
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines())
        for path in Path(clearhead.__file__).parent.rglob("*.*")
        if path.suffix in (".py", ".toml")
    }
    assert sum(lengths.values()) <= LINES, "delete as much as you add; LINES is never raised"
    assert not [
        str(path) for path, length in lengths.items() if path.suffix == ".py" and length > LONGEST
    ]
