"""The folder that `fedcsd deploy init` writes, and what it refuses to write."""

import re
import tomllib
from pathlib import Path

import pytest

from fedcsd.cli.new_method import method_text
from fedcsd.deploy.server.session import settings_of
from helpers.program import Fedcsd


def test_init_writes_an_app_with_instructions(fedcsd: Fedcsd, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(method_text("mine.py", "Mine"))
    options = (
        "--server",
        "a.org:1234",
        "--sites",
        "3",
        "--classes",
        "cat,dog",
        "--method",
        "mine.py:Mine:mu=0.5",
    )
    result = fedcsd("deploy", "init", "fed", *options, "--prototype-noise", "0.1")
    assert result.returncode == 0, result.stderr
    app = tomllib.loads((tmp_path / "fed/pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["components"]["clientapp"] == "fedcsd_app.client_app:app"
    config = app["config"]
    assert settings_of(config)["method"] == {"name": "fedcsd_app.mine:Mine", "mu": 0.5}
    assert (config["clients"], config["mode"], config["prototype_noise"]) == (3, "sites", 0.1)
    assert (tmp_path / "fed/fedcsd_app/mine.py").exists()
    pages = {path.name: path.read_text() for path in (tmp_path / "fed").rglob("*") if path.is_file()}
    assert "--superlink a.org:1234" in pages["JOIN.md"]
    assert "The classes are cat, dog." in pages["JOIN.md"]
    assert "listen 1234 ssl" in pages["nginx.conf"]
    assert "a.org:1234" in pages["fedcsd-supernode.service"]
    for name, text in pages.items():
        assert not re.search(r"\$(host|port|inner|sites|classes|check)\b", text), name


NET = "from torch import nn\ndef net(shape, classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))\n"


@pytest.mark.parametrize(
    ("option", "given", "said"),
    [
        ("--model", "nets.py", "/nets.py does not say which function or class makes the model: nets.py:NAME"),
        ("--model", "nets.py:nothere", "unknown function or class of nets.py 'nothere': "),
        ("--model", "none.py:net", "there is no file "),
        ("--model", "mlpp", "unknown model 'mlpp': did you mean mlp?"),
        ("--model", "client_app.py:net", "the app has a file client_app.py of its own: rename yours"),
        ("--model", "server_app.py:net", "the app has a file server_app.py of its own: rename yours"),
        ("--model", "__init__.py:net", "the app has a file __init__.py of its own: rename yours"),
        (
            "--model",
            "my.net.py:net",
            "my.net.py cannot be imported by its name: rename it, such as my_model.py",
        ),
        (
            "--method",
            "my-own.py",
            "my-own.py cannot be imported by its name: rename it, such as my_method.py",
        ),
        ("--method", "none.py:Mine", "there is no file "),
        ("--method", "fedprox:mu=x", "method.mu must be a number, not 'x'"),
    ],
)
def test_init_refuses_what_the_app_would_not_find(
    fedcsd: Fedcsd, tmp_path: Path, option: str, given: str, said: str
) -> None:
    for name in ("nets", "client_app", "server_app", "__init__", "my.net"):
        (tmp_path / f"{name}.py").write_text(NET)
    (tmp_path / "my-own.py").write_text(method_text("my-own.py", "Mine"))
    result = fedcsd("deploy", "init", "fed", "--server", "a.org", option, given)
    assert result.returncode == 2, result.stdout
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "fed").exists()


def test_init_takes_the_file_of_a_model_along(fedcsd: Fedcsd, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NET)
    result = fedcsd("deploy", "init", "fed", "--server", "a.org", "--model", "nets.py:net")
    assert result.returncode == 0, result.stderr
    app = tomllib.loads((tmp_path / "fed/pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["config"]["model"] == "fedcsd_app.nets:net"
    assert (tmp_path / "fed/fedcsd_app/nets.py").read_text() == NET
