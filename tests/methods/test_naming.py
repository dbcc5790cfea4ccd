"""Test the grammar of a method's name, which is the same everywhere: NAME[:PRESET][:OPTION=VALUE]…"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import fedcsd
from fedcsd.config.toml import merge, method_table
from fedcsd.errors import UserError
from fedcsd.experiments.choices import choices_of, make_method, resolved, resolved_method
from fedcsd.experiments.comparison_folder import run_name
from fedcsd.methods import methods
from fedcsd.plugins import Spec, short, spec_of
from helpers.federations import blobs

OWN = """
from dataclasses import dataclass
import fedcsd
from fedcsd.config import option

@dataclass(frozen=True)
class Mine(fedcsd.FedAvg):
    "Mine."
    mu: float = option(0.0, "unused")
    presets = {"strong": {"mu": 1.0}}
"""


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("fedavg", Spec("", "fedavg", ())),
        ("fedcsd:m1:mu=0.01", Spec("", "fedcsd", ("m1", "mu=0.01"))),
        ("/a/my_method.py:MyMethod:mu=0.1", Spec("/a/my_method.py", "MyMethod", ("mu=0.1",))),
        ("/a/my_method.py", Spec("/a/my_method.py", "", ())),
        ("/a/my_method.py:mu=0.1", Spec("/a/my_method.py", "", ("mu=0.1",))),
        ("/a/my_method.py:MyMethod:strong", Spec("/a/my_method.py", "MyMethod", ("strong",))),
        ("/lr=0.1/my.py:M", Spec("/lr=0.1/my.py", "M", ())),
        ("/a:b/my.py:M:x=y.py", Spec("/a:b/my.py", "M", ("x=y.py",))),
        ("fedcsd:mask=x.py", Spec("", "fedcsd", ("mask=x.py",))),
        ("lab.methods:Ours:mu=1", Spec("lab.methods", "Ours", ("mu=1",))),
        ("given from Python", Spec("", "given from Python", ())),
    ],
)
def test_names_are_taken_apart(text: str, spec: Spec) -> None:
    assert spec_of(text) == spec
    assert spec_of(spec.full).full == spec.full  # a name that was written down is read as the same


def test_a_file_is_written_down_with_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert spec_of("sub/../m.py:M").full == f"{tmp_path / 'm.py'}:M"
    assert short(f"{tmp_path / 'm.py'}:M") == "M"


def table(text: str) -> dict[str, Any]:
    return resolved_method(method_table(text))


def test_presets_and_options_become_a_table() -> None:
    assert method_table("fedcsd:m1:mu=0.01") == {"name": "fedcsd", ":m1": True, "mu": 0.01}
    assert table("fedcsd:m1:mu=0.01") == {"name": "fedcsd", "teacher": "global", "mu": 0.01}
    # What stands later goes over what stands earlier.
    assert table("fedcsd:m2:forcible")["mask"] == "forcible"
    assert table("fedcsd:forcible:mask=none")["mask"] == "none"
    assert table("fedcsd:mu=1:mu=2")["mu"] == 2


def test_every_preset_of_a_built_in_method_can_be_made() -> None:
    for name in methods.names:
        for preset in methods.load(name).presets:
            make_method(method_table(f"{name}:{preset}"))
    assert set(fedcsd.FedCSD.presets) == {
        "base", "m1", "m2", "m3", "forcible", "uniform", "scaled", "authors",
    }  # fmt: skip
    assert "presets" not in {f.name for f in fields(fedcsd.FedCSD)}


def test_layers_of_settings_take_names_with_presets() -> None:
    def method(*layers: dict[str, Any]) -> dict[str, Any]:
        return resolved(merge(*layers))["method"]

    file = {"method": {"name": "fedcsd:m1:mu=0.1", "tau": 4}}
    assert method(file) == {"name": "fedcsd", "teacher": "global", "mu": 0.1, "tau": 4}
    # Options beside the name go over those in it, and a later layer over an earlier one, presets too.
    assert method({"method": {"name": "fedcsd:mu=0.1", "mu": 0.2}})["mu"] == 0.2
    assert method(file, {"method": "fedcsd:mu=0.5"})["mu"] == 0.5
    assert method({"method": {"mask": "forcible"}}, {"method": "fedcsd:m2"})["mask"] == "none"
    assert method(file, {"method": "fedavg"}) == {"name": "fedavg"}
    assert method({"method": "fedcsd:m1"}, {"method": {"teacher": "average"}})["teacher"] == "average"


def test_run_takes_the_same_names() -> None:
    run = fedcsd.run(method="fedcsd:m1:mu=0.01", data=blobs(), clients=4, min_samples=2, rounds=1, workers=1)
    assert run.settings["method"]["name"] == "fedcsd"
    assert run.settings["method"]["teacher"] == "global"
    assert run.settings["method"]["mu"] == 0.01


def test_labels_are_what_was_typed_without_the_way_to_a_file(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "sub/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(OWN)
    a, b, c = (f"{tmp_path / name}:Mine" for name in ("a.py", "b.py", "sub/b.py"))
    assert list(choices_of(f"fedavg,fedcsd:m1:mu=1,{a}:mu=0.1,{b}", {})) == [
        "fedavg", "fedcsd:m1:mu=1", "Mine:mu=0.1", "Mine",
    ]  # fmt: skip
    assert list(choices_of([a, b, c], {})) == ["a.Mine", "b.Mine", "b.Mine-2"]
    assert list(choices_of([str(tmp_path / "a.py")], {})) == ["Mine"]
    assert run_name("Mine:mu=0.1", 3) == "Mine-mu=0.1-seed3"
    assert choices_of(f"{a}:strong", {})["Mine:strong"] == {"name": a, "mu": 1.0}
    with pytest.raises(UserError, match="twice"):
        choices_of(f"{a},{a}", {})


def test_all_are_the_built_in_methods() -> None:
    rest = [name for name in methods.names if name != "fedavg"]
    assert list(choices_of("all", {})) == ["fedavg", *rest]
    assert list(choices_of("all,fedcsd:base", {})) == ["fedavg", *rest, "fedcsd:base"]
    # What is named as well stands where it is named, so that it can be the one to compare with.
    assert list(choices_of("fedcsd,all", {})) == ["fedcsd", "fedavg", *(n for n in rest if n != "fedcsd")]
    assert list(choices_of(["all"], {})) == ["fedavg", *rest]


def test_lists_from_python_mix_names_and_objects() -> None:
    chosen = choices_of(
        [
            "fedcsd:m1",
            fedcsd.FedCSD(mu=1.0),
            fedcsd.FedCSD(mu=2.0),
            {"name": "fedcsd", "mu": 3},
            fedcsd.FedAvg,
        ],
        {"tau": 4},
    )
    assert list(chosen) == ["fedcsd:m1", "FedCSD:mu=1.0", "FedCSD:mu=2.0", "fedcsd:mu=3", "FedAvg"]
    assert chosen["fedcsd:m1"] == {"name": "fedcsd", "teacher": "global", "tau": 4}
    with pytest.raises(UserError, match="at least one method"):
        choices_of([], {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fedcsd:unifrom", "unknown preset 'unifrom' of fedcsd: did you mean uniform.* choose from base, m1"),
        ("fedcsd:zzz", "unknown preset 'zzz' of fedcsd: choose from base, m1"),
        ("fedcsd:mu", "mu is an option of fedcsd: give it a value, fedcsd:mu=…"),
        ("fedavg:x", "fedavg has no presets"),
        ("fedcds:x", "unknown method 'fedcds': did you mean fedcsd"),
        ("fedcsd:name=x", "OPTION=VALUE"),
        ("fedcsd:=1", "OPTION=VALUE"),
    ],
)
def test_mistakes_in_a_name(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        table(text)
