"""Add pages and rewrite links for MkDocs (`hooks:` in mkdocs.yml).

Reference pages are made from the code, the notebook and the changelog become pages, and a link to a file
of the repository outside docs/ leads to a page that shows it.
"""

import base64
import json
import posixpath
import re
from pathlib import Path
from typing import Any

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".md": "markdown"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, make in reference.PAGES.items():
        files.append(File.generated(config, path, content=make()))
    for path, content in notebook(ROOT / "docs" / "notebook.ipynb"):
        files.append(File.generated(config, path, content=content))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    changes = re.sub(r"\]\(docs/", "](", changes).replace("# Changelog", "# Changes", 1)
    files.append(File.generated(config, "changes.md", content=changes))
    for path in sorted(outside(files)):
        files.append(File.generated(config, shown_at(path), content=source_page(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links that leave docs/, or name the notebook, to the pages made of those files."""
    here = page.file.src_uri
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])  # a tab of one page: there is nothing beside it

    def link(match: re.Match[str]) -> str:
        if match[1].endswith(".ipynb"):
            return match[1].removesuffix(".ipynb") + ".md"
        path = left(here, match[1])
        if path is None:
            return match[0]
        return posixpath.relpath(shown_at(path), posixpath.dirname(here) or ".")

    return LINK.sub(link, markdown)


def left(page: str, target: str) -> str | None:
    """The file in the repository that a link of a page means, if it lies outside docs/."""
    if "://" in target or target.startswith(("mailto:", "/")):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") else path


def outside(files: Files) -> set[str]:
    """Return all files outside docs/ to which pages link."""
    found = set()
    for file in files.documentation_pages():
        for match in LINK.finditer(file.content_string):
            path = left(file.src_uri, match[1])
            if path is not None and (ROOT / path).exists():
                found.add(path)
    return found


def shown_at(path: str) -> str:
    """Return the site's page of a file: src/fedcsd/seeds.py is source/src/fedcsd/seeds.py.md."""
    return f"source/{path}.md"


def source_page(path: str) -> str:
    """Return a file as a page, and a folder as a list of its files."""
    there = ROOT / path
    head = f"---\ntitle: {there.name}\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    if there.is_dir():
        return head + "\n".join(f"- `{p.name}`" for p in sorted(there.glob("*.py"))) + "\n"
    text = there.read_text(encoding="utf-8")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=2))
    return f"{head}{max(fence, '```', key=len)}{LANGUAGES.get(there.suffix, 'text')}\n{text}\n{max(fence, '```', key=len)}\n"


def notebook(path: Path) -> list[tuple[str, str | bytes]]:
    """Return the notebook as a page, and its pictures."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    found: list[tuple[str, str | bytes]] = []
    lines: list[str] = []
    for number, cell in enumerate(cells):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines.append(text)
            continue
        lines.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            shown, picture = output_of(output, f"images/notebook-{number}.png")
            lines.append(shown)
            found += picture
    return [("notebook.md", "\n\n".join(lines) + "\n"), *found]


def output_of(output: dict[str, Any], name: str) -> tuple[str, list[tuple[str, str | bytes]]]:
    """Return a cell's output as Markdown, and write its picture."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![What the cell drew]({name})", [(name, base64.b64decode(data["image/png"]))]
    if "text/markdown" in data:
        return "".join(data["text/markdown"]), []
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"```text\n{text.rstrip()}\n```", []
