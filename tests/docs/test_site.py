"""Test the documentation's site: it is built strictly, documents the whole code, and loads nothing from elsewhere."""

import html
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import fedcsd
from fedcsd.cli.main import cli
from fedcsd.config import Settings
from fedcsd.config.options import describe
from fedcsd.config.settings import COMPONENTS
from fedcsd.methods import methods

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


def text_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


def test_every_setting_is_in_the_reference(site: Path) -> None:
    page = (site / "reference/settings.html").read_text(encoding="utf-8")
    plain = " ".join(text_of(site / "reference/settings.html").split())
    for field in fields(Settings):
        assert f'id="{field.name}"' in page
        assert f"--{field.name.replace('_', '-')}" in plain
        assert " ".join(field.metadata["meaning"].split()) in plain
    for name in COMPONENTS:
        assert f'id="{name}"' in page


def test_every_option_of_a_method_is_in_the_reference(site: Path) -> None:
    plain = " ".join(text_of(site / "reference/methods.html").split())
    for name in methods.names:
        for key, default, meaning in describe(methods.load(name)):
            assert " ".join(f"{key} {default} {meaning}".split()) in plain, f"{name}:{key}"


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    plain = text_of(site / "reference/commands.html")
    for name, command in cli.commands.items():
        assert f"fedcsd {name}" in plain
        for option in command.params:
            assert option.param_type_name == "argument" or max(option.opts, key=len) in plain
    assert "[bold]" not in plain
    assert "[dim]" not in plain


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = (site / "reference/python.html").read_text(encoding="utf-8")
    for name in fedcsd.__all__:
        assert f'id="fedcsd.{name}"' in page, name


def test_every_method_has_a_page_and_its_code_is_shown(site: Path) -> None:
    for name in methods.names:
        page = (site / f"methods/{name}.html").read_text(encoding="utf-8")
        assert f"../source/src/fedcsd/methods/{name}.py.html" in page
        assert (site / f"source/src/fedcsd/methods/{name}.py.html").exists()


def test_nothing_comes_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"((?:https?:)?//[^\"]+)", text
        )
        assert not loaded, f"{page.name} loads {loaded}"  # fmt: skip
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def test_pictures_say_what_they_show(site: Path) -> None:
    for page in site.rglob("*.html"):
        for image in re.findall(r"<img [^>]+>", page.read_text(encoding="utf-8")):
            assert re.search(r'alt="[^"]{10,}"', image), f"{page.name}: {image}"


def test_the_notebook_is_a_page_with_what_it_gave(site: Path) -> None:
    page = (site / "notebook.html").read_text(encoding="utf-8")
    assert "FedAvg after 15 rounds" in page
    pictures = re.findall(r'src="(images/notebook-\d+\.png)"', page)
    assert len(pictures) == 1
    assert (site / pictures[0]).read_bytes().startswith(b"\x89PNG")


def test_the_notebook_runs() -> None:
    from notebook import PATH, executed

    kept, now = PATH.read_text(encoding="utf-8"), executed()
    assert '"output_type": "error"' not in kept
    given = [output for cell in now.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in given)
    assert len(given) == sum(len(cell.get("outputs", [])) for cell in _cells(kept)), "run tools/notebook.py"


def _cells(text: str) -> list[dict[str, list[object]]]:
    import json

    cells: list[dict[str, list[object]]] = json.loads(text)["cells"]
    return cells
