import contextlib
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcsd.config import Settings
from fedcsd.config.options import build, describe, plain
from fedcsd.config.toml import merge, parse_assignments
from fedcsd.errors import UserError
from fedcsd.methods import methods


def test_every_option_says_what_it_means() -> None:
    for cls in (Settings, *(methods.load(name) for name in methods.names)):
        for name, _, meaning in describe(cls):
            assert meaning, f"{cls.__name__}.{name}"
        assert cls.__doc__


def test_plain_and_build_are_inverse() -> None:
    settings = Settings(lr=0.5, track_drift=True)
    assert build(Settings, plain(settings)) == settings


def test_whole_numbers_are_numbers_but_not_the_other_way() -> None:
    assert build(Settings, {"lr": 1}).lr == 1.0
    for value in (1.0, True, "3", None):
        with pytest.raises(UserError, match="rounds must be a whole number"):
            build(Settings, {"rounds": value})


ANYTHING = st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none())


@given(st.dictionaries(st.sampled_from([f.name for f in fields(Settings)]), ANYTHING))
def test_any_values_give_settings_in_range_or_a_user_error(values: dict) -> None:
    with contextlib.suppress(UserError):
        settings = build(Settings, values)
        assert settings.rounds >= 1
        assert settings.lr > 0
        assert 0 < settings.participation <= 1


def test_assignments() -> None:
    parsed = parse_assignments(
        ["rounds=50", "method.mu=0.01", "method.mask=none", "data=a.npz", "track_drift=true", 'model="mlp"']
    )
    assert parsed == {
        "rounds": 50,
        "method": {"mu": 0.01, "mask": "none"},
        "data": {"name": "a.npz"},
        "track_drift": True,
        "model": {"name": "mlp"},
    }
    for order in (["method.mu=1", "method=fedcsd"], ["method=fedcsd", "method.mu=1"]):
        assert parse_assignments(order) == {"method": {"name": "fedcsd", "mu": 1}}
    with pytest.raises(UserError, match="both to a value and to a table"):
        parse_assignments(["a=1", "a.b=2"])
    for text in ("rounds", "=3", ""):
        with pytest.raises(UserError, match="KEY=VALUE"):
            parse_assignments([text])


def test_layers() -> None:
    assert merge({"a": 1, "method": {"name": "x", "mu": 1}}, {"a": 2}, {"method": {"mu": 2}}) == {
        "a": 2,
        "method": {"name": "x", "mu": 2},
    }
    assert merge({"method": {"name": "x", "mu": 1}}, {"method": "y"}) == {"method": {"name": "y"}}
    assert merge({"method": {"name": "x", "mu": 1}}, {"method": "x"}) == {"method": {"name": "x", "mu": 1}}
    assert merge({"method": {"mu": 1}}, {"method": "x"}) == {"method": {"mu": 1, "name": "x"}}
    assert merge({"data": "digits"}, {"data": {"classes": 62}}) == {"data": {"name": "digits", "classes": 62}}
    with pytest.raises(UserError, match="method must be"):
        merge({"method": 3})
