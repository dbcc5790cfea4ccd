"""A setting costs one line: every part of the program reads its description."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedcsd

pytestmark = pytest.mark.slow
LINE = '    patience: int = _training(3, "an extra setting", ge=0, on_resume="mends")\n'
SCRIPT = """
import json, sys, tomllib
from pathlib import Path
import fedcsd
from click.testing import CliRunner
from fedcsd.cli.main import cli
from fedcsd.config.settings import settings_where
from fedcsd.deploy.server.session import settings_of
from fedcsd.paper.plan import digest
from fedcsd.results.groups import labels_of
from fedcsd.experiments.summary import notable

def error(call):
    try:
        call()
    except fedcsd.UserError as error:
        return str(error)

def config():
    return tomllib.loads(Path("r/config.toml").read_text())

short = {"method": "fedavg", "rounds": 1, "epochs": 1, "clients": 3, "workers": 1}
commands = ("run", "compare", "partition", "resume", "deploy local", "reproduce")
found = {"help": {c: CliRunner().invoke(cli, [*c.split(), "--help"]).output for c in commands}}
run = fedcsd.run(**short, patience=4, out="r")
found["written"] = config()["patience"]
found["wrong"] = error(lambda: fedcsd.run(**short, patience=-1))
resumed = fedcsd.resume("r", rounds=2, patience=5)
found["resumed"], found["facts"] = config()["patience"], config()["facts"]
usual = {**resumed.settings, "patience": 3}
found["labels"] = labels_of([resumed.settings, usual])
found["told"], found["untold"] = notable(resumed.settings).get("patience"), notable(usual).get("patience")
found["digests"] = len({digest({"patience": value}) for value in (3, 4)})
found["server"] = settings_of({"patience": 7})["patience"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what a copy of the package with one more setting says."""
    pytest.importorskip("flwr")
    folder = tmp_path_factory.mktemp("extra")
    package = folder / "src" / "fedcsd"
    shutil.copytree(Path(fedcsd.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    settings = package / "config" / "settings.py"
    before, start, rest = settings.read_text().partition("    epochs: int =")
    settings.write_text(before + LINE + start + rest)
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "COLUMNS": "200"}
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr
    content: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return content


def test_commands_that_train_have_the_option_in_its_panel(found: dict[str, Any]) -> None:
    for command in ("run", "compare", "resume", "deploy local", "reproduce"):
        panel = found["help"][command].partition("─ Training ─")[2].partition("╰")[0]
        assert "--patience" in panel, command
        assert "an extra setting" in panel, command
    assert "--patience" not in found["help"]["partition"]


def test_config_toml_has_it_and_its_range_is_checked(found: dict[str, Any]) -> None:
    assert found["written"] == 4
    assert found["wrong"] == "patience must be at least 0, not -1"
    assert found["server"] == 7


def test_resume_follows_its_rule_and_notes_the_change(found: dict[str, Any]) -> None:
    assert found["resumed"] == 5
    change = {"round": 1, "kind": "setting", "name": "patience", "before": 4, "after": 5}
    assert change in found["facts"]["changes"]


def test_labels_captions_and_run_names_have_it(found: dict[str, Any]) -> None:
    assert found["labels"] == ["fedavg, patience=5", "fedavg, patience=3"]
    assert (found["told"], found["untold"]) == (5, None)
    assert found["digests"] == 2
