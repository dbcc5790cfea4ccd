"""What `fedcsd reproduce --dry-run` refuses without looking at any data."""

import pytest
from conftest import Fedcsd


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--model", "nosuch"), "unknown model 'nosuch'"),
        (("--stand-in", "femnist=nosuch"), "unknown data set 'nosuch'"),
        (("--stand-in", "femnist=/no/such.npz"), "unknown data set '/no/such.npz'"),
    ],
)
def test_a_dry_run_knows_names(fedcsd: Fedcsd, given: tuple[str, ...], told: str) -> None:
    said = fedcsd("reproduce", "table1", "--only", "data=femnist", *given, "--dry-run")
    assert said.returncode == 2
    assert told in said.stderr
