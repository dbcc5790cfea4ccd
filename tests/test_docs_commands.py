"""Every command and every piece of Python in the documentation is run (see docs_rules.py for what is changed)."""

import shlex
from pathlib import Path

import pytest
from docs_pages import ROOT, blocks, carry_out, follow, inline

from fedcsd.cli_new import method_text

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
TYPED = [page for page in PAGES if list(blocks(page.read_text(encoding="utf-8")))]


@pytest.mark.parametrize("page", TYPED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_can_be_followed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow(page, tmp_path)


COMMANDS = sorted({command for page in PAGES for command in inline(page.read_text(encoding="utf-8"))})


def test_commands_within_sentences_are_right(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "my_method.py").write_text(method_text("my_method.py", "MyMethod"))
    assert len(COMMANDS) > 20
    for command in COMMANDS:
        status, said = carry_out(shlex.split(command), {}, tmp_path, how="parse")
        assert status == 0, said
