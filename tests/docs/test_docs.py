"""Test the documentation: links lead somewhere, and parts made from the code are up to date.

Its commands and its Python are run by test_docs_commands.py.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if heading:
            headings = [
                re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-")
                for h in re.findall(r"^#+ (.*)$", there.read_text(), re.M)
            ]
            assert heading in headings


def test_every_file_named_in_the_architecture_exists() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    house = text.split("```")[1]
    for name in re.findall(r"^  ([\w/.]+)", house, re.M):
        assert (ROOT / "src/fedcsd" / name).exists(), name
    named = set(re.findall(r"[\w]+\.py", house)) | {"__init__.py", "__main__.py"}
    for path in (ROOT / "src/fedcsd").glob("*.py"):
        assert path.name in named, f"docs/architecture.md does not show {path.name}"


def test_the_pages_of_methods_have_the_options_of_the_code_and_the_numbers_of_the_results() -> None:
    from method_pages import stale

    assert stale() == [], "run python studies/method_pages.py"
