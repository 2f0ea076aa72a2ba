"""A hook of mkdocs: pages at their paths in the repository, and the API's, one a package."""

import ast
import logging
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = (
    "*.md",
    "LICENSE",
    "CITATION.cff",
    "docs/*.md",
    "docs/*.svg",
    "docs/*.png",
    "results/README.md",
    "results/books.tsv",
    "results/figures/*.svg",
)
DOCUMENTED: dict[str, list[str]] = {}  # page -> names on it


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take the repository's pages and figures in place of `docs_dir`'s, and generate the API's."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    root = Path(config.config_file_path).parent
    for path in sorted(path for pattern in REPOSITORY for path in root.glob(pattern)):
        name = path.relative_to(root).as_posix()
        files.append(File(name, str(root), config.site_dir, config.use_directory_urls))
    for source in [root / "src/clearhead/__init__.py", *root.glob("src/clearhead/*/__init__.py")]:
        package = ".".join(source.parent.relative_to(root / "src").parts)
        if names := _public(source):
            page = f"api/{package}.md"
            content = [
                f"# {package}\n\n::: {package}\n    options: {{members: false}}",
                *(f"::: {name}\n    options: {{show_root_heading: true}}" for name in names),
            ]
            files.append(File.generated(config, page, content="\n\n".join(content)))
            DOCUMENTED[page] = names
    return files


def on_page_content(html: str, page: Page, **_: object) -> None:
    """Warn of public names without a docstring: they are not on the page."""
    for name in DOCUMENTED.get(page.file.src_uri, ()):
        if f'id="{name}"' not in html:
            logging.getLogger("mkdocs.hooks").warning("%s has no docstring", name)


def _public(source: Path) -> list[str]:
    """Names in a package's `__all__`, or imported under their own names, with their modules."""
    modules: dict[str, str] = {}
    names: list[str] = []
    for statement in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(statement, ast.ImportFrom):
            modules |= {each.name: f"{statement.module}.{each.name}" for each in statement.names}
            names += [each.name for each in statement.names if each.asname == each.name]
        elif isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names = ast.literal_eval(statement.value)
    return [modules[name] for name in names]
