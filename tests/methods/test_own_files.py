"""Test methods in a file, in a module, or in an installed package: each is found by name, and mistakes are told in one line."""

import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import fedcsd
from fedcsd.config.toml import method_table
from fedcsd.errors import Note, RunStopped, UserError
from fedcsd.experiments.choices import make_method
from fedcsd.experiments.runs.recorded import Change
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.federation.backends.local import LocalBackend
from fedcsd.methods import methods
from helpers.federations import assert_found_by_workers, small
from helpers.program import Fedcsd

HEAD = """from __future__ import annotations
from dataclasses import dataclass
import fedcsd
from fedcsd.config import option
"""
SCALED = (
    HEAD
    + """
@dataclass(frozen=True)
class Scaled(fedcsd.FedAvg):
    "Its loss times a number."
    by: float = option(1.0, "the number")

    def loss(self, batch):
        return super().loss(batch) * self.by
"""
)
QUICK = {"clients": 3, "epochs": 1, "train_size": 200, "workers": 1}


@pytest.fixture(autouse=True)
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def write(name: str, text: str) -> Path:
    path = Path(name).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "name", ["mine.py:Scaled", "mine.py", "mine.py:by=1.0", "lab.mine:Scaled", "lab.mine"]
)
def test_a_method_is_found_in_a_file_or_a_module(name: str) -> None:
    write("mine.py", SCALED)
    write("lab/mine.py", SCALED)
    method = make_method(method_table(name))
    assert type(method).__name__ == "Scaled"
    assert method.by == 1.0  # type: ignore[attr-defined]
    sys.modules.pop("lab.mine", None), sys.modules.pop("lab", None)


def test_a_file_may_have_the_name_of_a_library_and_import_files_beside_it() -> None:
    import random as library

    write("sub/helper_of_random.py", "BY = 3.0\n")
    write(
        "sub/random.py",
        SCALED.replace("option(1.0", "option(BY").replace(
            "import fedcsd\n", "import fedcsd\nfrom helper_of_random import BY\n", 1
        ),
    )
    method = make_method(method_table("sub/random.py:Scaled"))
    assert method.by == 3.0  # type: ignore[attr-defined]
    import random

    assert random is library
    assert sys.path[-1] == str(Path("sub").resolve())  # behind everything, so that it hides nothing


def test_a_file_that_changed_is_read_again_and_one_that_did_not_is_not() -> None:
    write("mine.py", SCALED)
    first = methods.load("mine.py:Scaled")
    assert methods.load("mine.py") is first
    write("mine.py", SCALED.replace("1.0", "2.0"))
    assert methods.load("mine.py")().by == 2.0


@pytest.mark.slow
def test_spawned_workers_find_it() -> None:
    write("test.py", SCALED)
    experiment = small(make_method(method_table("test.py:by=0.5")))
    assert_found_by_workers(experiment)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["other.py:Scaled", "lab.other:Scaled"])
def test_spawned_workers_never_load_a_file_that_has_changed(name: str) -> None:
    write("other.py", SCALED)
    write("lab/other.py", SCALED)
    experiment = small(make_method(method_table(name)))
    try:
        assert_found_by_workers(experiment)
        write("other.py", SCALED.replace("1.0", "2.0"))
        write("lab/other.py", SCALED.replace("1.0", "2.0"))
        with pytest.raises(RunStopped, match=r"other.py has changed since the run loaded it"):
            LocalBackend(experiment.worker(), experiment.network.layout, 1, "spawn")
    finally:
        sys.modules.pop("lab.other", None), sys.modules.pop("lab", None)


BAD = {
    "nothing.py": ("", "there is no file .*nothing.py: `fedcsd new-method`"),
    "syntax.py": ("x = 1\ndef f(:\n", r"cannot be imported: SyntaxError: .* \(syntax.py, line 2\)"),
    "imports.py": ("\nimport no_such_thing\n", r"No module named 'no_such_thing' \(imports.py, line 2\)"),
    "beside.py": ("import imports\n", r"No module named 'no_such_thing' \(imports.py, line 2\)"),
    "raises.py": ("\n\n1 / 0\n", r"ZeroDivisionError: division by zero \(raises.py, line 3\)"),
    "exits.py": ("raise SystemExit\n", "exits.py cannot be imported: SystemExit"),
    "empty.py": ("", "empty.py has no method"),
    "empty.py:Mine": ("", "empty.py has no method"),
    "mine.py:Scalde": (SCALED, "unknown class of mine.py 'Scalde': did you mean Scaled"),
    "mine.py:HEAD": (SCALED + "HEAD = 1", "mine.py:HEAD is no method"),
    "mine.py:Scaled:bye=1": (SCALED, "'bye' is no option of Scaled: did you mean by"),
    "mine.py:Scaled:by=x": (SCALED, "method.by must be a number, not 'x'"),
    "two.py": (SCALED + "class B(Scaled): pass", "several methods: say which, two.py:Scaled or two.py:B"),
    "plain.py": (HEAD + "class A(fedcsd.FedAvg):\n    mu: float = 1.0", "mu is no option of A yet: write @data"),
    "lacks.py": (HEAD + "@dataclass(frozen=True)\nclass A(fedcsd.FedAvg):\n    mu: float", "mu of A needs a default"),
    "half.py": (HEAD + "class A(fedcsd.Method): pass", r"A has no round\(\): define it"),
    "thaw.py": (HEAD + "@dataclass\nclass A(fedcsd.FedAvg): pass", r"\(thaw.py, line 5\): write @dataclass\(frozen"),
    "types.py": (HEAD + "@dataclass(frozen=True)\nclass A(fedcsd.FedAvg):\n    mu: Foo = 1", "'Foo' is not defined"),
    "name.py": (HEAD + "@dataclass(frozen=True)\nclass A(fedcsd.FedAvg):\n    name: str = ''", "cannot be called name"),
    "sets.py": (HEAD + "class A(fedcsd.FedAvg):\n    presets = {'a': 1}", "presets must be a dict of dicts"),
    "unknown.py": (SCALED + "    presets = {'half': {'buy': 0.5}}", "'half' sets 'buy', which is no option of Scaled"),
    "low.py": (SCALED.replace('"the number"', '"the number", gt=2'), "method.by must be more than 2, not 1.0"),
    "choice.py:Scaled:to=c": (SCALED + "    from typing import Literal\n    to: Literal['a', 'b'] = 'a'", "value of method.to 'c'"),
    "post.py:A": (HEAD + "@dataclass(frozen=True)\nclass A(fedcsd.FedAvg):\n    def __post_init__(self): 1 / 0", "division"),
    "lab.nothing:A": ("", "lab.nothing cannot be imported: .*install it, or start in the folder"),
    "mine": ("", "did you mean the file, mine.py"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_mistakes_in_a_file_get_one_line(name: str) -> None:
    text, message = BAD[name]
    write("imports.py", BAD["imports.py"][0])
    write("mine.py", SCALED)
    if ".py" in name and name != "nothing.py":
        write(name.partition(":")[0], text)
    before, path = set(sys.modules), list(sys.path)
    with pytest.raises(UserError, match=message) as caught:
        make_method(method_table(name))
    assert "\n" not in str(caught.value)
    if "cannot be imported" in str(caught.value):
        assert {m for m in set(sys.modules) - before if "lab" not in m} == set()
        assert "lab" in name or sys.path == path


NEAR = (
    HEAD
    + """
class A(fedcsd.FedAvg):
    def {name}(self, batch):
        return batch.cross_entropy
    {rest}
"""
)


@pytest.mark.parametrize(
    ("name", "rest", "meant"),
    [
        ("los", "", "loss"),
        ("trian", "", "train"),
        ("Round", "", "round"),
        ("los", "def loss(self, batch): return 1", ""),  # it has the real one
        ("losses", "def start(self, server): self.losses(1)", ""),  # it is called
        ("_los", "", ""),
        ("count", "", ""),
    ],
)
def test_a_function_that_nearly_has_the_name_of_one_of_ours_is_noted(
    name: str, rest: str, meant: str
) -> None:
    write("near.py", NEAR.format(name=name, rest=rest))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make_method(method_table("near.py:A"))
    told = [str(w.message) for w in said if w.category is Note]
    assert told == ([f"A.{name}() overrides nothing: did you mean {meant}()?"] if meant else [])


def changed_run() -> None:
    write("mine.py", SCALED)
    fedcsd.run(method="mine.py:Scaled:by=0.5", rounds=2, out="run", **QUICK)


@pytest.mark.slow
def test_a_run_is_resumed_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed_run()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    fedcsd.resume("../run", rounds=3)
    whole = fedcsd.run(method="../mine.py:Scaled:by=0.5", rounds=3, out="whole", **QUICK)
    assert whole.settings["method"] == {"name": f"{tmp_path / 'mine.py'}:Scaled", "by": 0.5}
    assert Path("../run/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    assert not any(change.kind == "code" for change in RunDirectory.open(Path("../run")).changes)


@pytest.mark.filterwarnings("error::fedcsd.errors.Note")
def test_code_that_changed_is_noticed_and_noted() -> None:
    changed_run()
    before = RunDirectory.open(Path("run")).config["facts"]["code"]["method"]
    write("mine.py", SCALED + "# a remark\n")
    with pytest.warns(Note, match=r"run was trained before .*mine.py changed"):
        fedcsd.load_run("run")
    with pytest.warns(Note, match=r"the code of .*mine.py:Scaled has changed since run was started"):
        fedcsd.resume("run", rounds=3)
    now = RunDirectory.open(Path("run"))
    code = now.config["facts"]["code"]["method"]
    assert now.changes == [Change(2, "setting", "rounds", 2, 3), Change(2, "code", "method", before, code)]
    fedcsd.resume("run", rounds=4)  # what was said once is not said again: a Note would be an error here
    Path("mine.py").unlink()
    assert len(fedcsd.load_run("run").history) == 4
    with pytest.raises(UserError, match=r"the method of .* is not there"):
        fedcsd.resume("run", rounds=5)


def installed(folder: Path, *entries: str, name: str = "lab_methods") -> None:
    """A package as pip leaves it: its modules, and a dist-info folder with entry points."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[fedcsd.methods]", *entries]) + "\n")


@pytest.mark.slow
def test_installed_methods_are_found_listed_and_run(tmp_path: Path) -> None:
    site = tmp_path / "site"
    write("site/lab/scaled.py", SCALED)
    write("site/lab/broken.py", "raise RuntimeError('out of order')")
    installed(
        site,
        "scaled = lab.scaled:Scaled",
        "broken = lab.broken:Broken",
        "fedavg = lab.scaled:Scaled",
        "twice = lab.scaled:Scaled",
    )
    installed(site, "twice = lab.broken:Other", name="other_lab")

    def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(site)]))
        return subprocess.run(
            [sys.executable, "-m", "fedcsd", *arguments],
            capture_output=True,
            text=True,
            timeout=150,
            env={**os.environ, "COLUMNS": "200", "PYTHONPATH": path},
        )

    listed = call("list", "methods")
    assert listed.returncode == 0, listed.stderr
    lines = [" ".join(line.split()) for line in listed.stdout.replace("│", " ").splitlines()]
    assert any(line.startswith("scaled Its loss times a number. (lab.scaled:Scaled) by=") for line in lines)
    assert "cannot be used: lab.broken cannot be imported: RuntimeError" in " ".join(lines)
    assert any(line.startswith("fedavg lab.scaled:Scaled is hidden by the built-in method") for line in lines)
    assert "several installed packages have a method 'twice'" in " ".join(lines)
    assert "presets base, m1, m2" in " ".join(lines)
    one = call("list", "methods", "scaled")
    assert "meaning" in one.stdout
    run = call("run", "--method", "scaled:by=0.5", "--rounds", "1", "--epochs", "1")
    assert run.returncode == 0, run.stderr
    config = tomllib.loads(Path("runs/scaled-digits/config.toml").read_text())
    assert config["method"] == {"name": "scaled", "by": 0.5}
    assert config["facts"]["code"]["method"]
    wrong = call("run", "--method", "scaleed")
    assert wrong.returncode == 2
    assert wrong.stderr == "error: unknown method 'scaleed': did you mean scaled?\n"


def test_names_of_installed_methods_that_cannot_be_typed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from fedcsd.methods._own import from_entry

    for name in ("a.b", "a:b", "all", "a,b", "a.py"):
        with pytest.raises(UserError, match="a method cannot be called"):
            from_entry(name, [EntryPoint(name, "lab:X", "fedcsd.methods")])


def test_list_of_a_file_shows_all_its_methods(fedcsd: Fedcsd, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "import fedcsd\n\n\nclass A(fedcsd.FedAvg):\n    'One.'\n\n\nclass B(fedcsd.FedAvg):\n    'Other.'\n"
    )
    shown = fedcsd("list", "methods", "two.py").stdout
    assert "two.py:A  One." in shown
    assert "two.py:B  Other." in shown


def test_list_of_a_file_leaves_out_what_cannot_be_chosen(fedcsd: Fedcsd, tmp_path: Path) -> None:
    base = "import abc\nimport fedcsd\n\n\nclass Base(fedcsd.FedAvg):\n    @abc.abstractmethod\n"
    one = "\n\nclass A(Base):\n    'One.'\n\n    def part(self): ...\n"
    (tmp_path / "one.py").write_text(f"{base}    def part(self): ...\n{one}")
    shown = fedcsd("list", "methods", "one.py")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "one.py  One." in shown.stdout
    (tmp_path / "two.py").write_text(f"{(tmp_path / 'one.py').read_text()}{one.replace('A', 'B')}")
    shown = fedcsd("list", "methods", "two.py")
    assert (shown.returncode, shown.stdout.count("One.")) == (0, 2)
    assert "Base" not in shown.stdout


def test_list_of_a_method_of_one_s_own(fedcsd: Fedcsd) -> None:
    fedcsd("new-method", "mine.py")
    shown = fedcsd("list", "methods", "mine.py").stdout
    assert "\n    fedcsd run --method mine.py:Mine\n" in shown  # a line of its own
    assert "mine.py:Mine:strong" in shown  # as --method takes it
