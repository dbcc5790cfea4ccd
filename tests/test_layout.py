"""The layout of tests/: a folder for each room of src/, shared code in helpers/, and the signals of children."""

import ast
import subprocess
import sys
from pathlib import Path

import fedcsd
from helpers.program import TESTS

ROOMS = Path(fedcsd.__file__).parent
NOT_OF_THE_PACKAGE = {"helpers", "docs", "benchmarks", "studies"}
MODULES = sorted(TESTS.rglob("*.py"))


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}


def test_no_module_imports_a_test_module() -> None:
    ours = {path.stem for path in MODULES if path.parent.name != "helpers"}
    for path in MODULES:
        assert not {name for name in imported(path) if name.rpartition(".")[2] in ours}, path


def test_a_folder_of_tests_is_a_room_of_the_package() -> None:
    for path in MODULES:
        room = path.parent.relative_to(TESTS)
        if not NOT_OF_THE_PACKAGE & set(room.parts):
            assert (ROOMS / room).is_dir() or (ROOMS / room).with_suffix(".py").is_file(), path


def test_helpers_hold_no_tests() -> None:
    assert not [path for path in MODULES if path.parent.name == "helpers" and "def test_" in path.read_text()]


IGNORING = """
import signal, subprocess, sys
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
from helpers.program import pass_on_no_ignored_signals
pass_on_no_ignored_signals()
signal.raise_signal(signal.SIGINT)
signal.raise_signal(signal.SIGHUP)
child = "import os, signal; os.kill(os.getpid(), {}); signal.pause()"
for number in (signal.SIGINT, signal.SIGHUP):
    ended = subprocess.run([sys.executable, "-c", child.format(int(number))], stderr=subprocess.DEVNULL)
    assert ended.returncode == -number, ended
"""


def test_what_tests_start_can_be_interrupted_although_the_runner_ignores_signals() -> None:
    subprocess.run([sys.executable, "-c", IGNORING], cwd=TESTS, check=True, timeout=60)
