"""Refuse riddles in docstrings and pages: the files that pre-commit gives."""

import ast
import re
import sys
from pathlib import Path

FORMS = re.compile(r"\b(of which|in whose|that it is of|nothing but|is not to be had)\b", re.I)
# The docs' build, which is strict, knows a parameter by a line of its own.
SHARED = re.compile(r"^\s+Args:\n(?:(?!^\s+[A-Z]\w+:\n).*\n)*?\s+(\w+(?:, \w+)+): ", re.M)
OPENINGS = re.compile(r"(What|Which|Whether|How)\b")
LISTED = Path(__file__).with_name("english.txt")  # lines of "path count" still to be mended


def texts(path: Path) -> list[tuple[int, str]]:
    """(line, text) of every docstring of a module, or of a whole page."""
    source = path.read_text("utf-8")
    if path.suffix != ".py":
        return [(1, source)]
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    values = [node.value for node in statements if isinstance(node.value, ast.Constant)]
    return [(value.lineno, value.value) for value in values if isinstance(value.value, str)]


def faults(path: Path) -> list[str]:
    """Lines of "path:line: form", one for every refused form."""
    lines = []
    for first, text in texts(path):
        if path.suffix == ".py" and (opening := OPENINGS.match(text.lstrip())):
            lines.append(f"{path}:{first}: opens with {opening[0]}: name the thing")
        if path.suffix == ".py" and (names := SHARED.search(text)):
            lines.append(f"{path}:{first}: {names[1]}: a line for each parameter")
        for form in FORMS.finditer(re.sub(r"\s", " ", text)):
            line = first + text[: form.start()].count("\n")
            lines.append(f'{path}:{line}: "{form[0]}": say it in two sentences')
    return lines


if __name__ == "__main__":
    allowed = dict(line.split() for line in LISTED.read_text("utf-8").splitlines())
    by_file = {name: faults(Path(name)) for name in sys.argv[1:]}
    refused = [lines for name, lines in by_file.items() if len(lines) > int(allowed.get(name, 0))]
    print(*(line for lines in refused for line in lines), sep="\n", end="\n" if refused else "")
    sys.exit(bool(refused))
