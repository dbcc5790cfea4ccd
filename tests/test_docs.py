"""The documentation is true: links lead somewhere, commands parse, Python examples run."""

import re
import shlex
from pathlib import Path

import pytest
import rich_click as click

from fedcsd.cli import cli
from fedcsd.cli_new import method_text
from fedcsd.comparison import parse_methods
from fedcsd.config import TABLES, Settings, layered, parse_assignments, read_toml

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
COMMAND = re.compile(
    r"^\s+(fedcsd (?:run|resume|compare|show|list|partition|new-method|drift|tsne|plot|reproduce|deploy)\b.*)$",
    re.MULTILINE,
)


def commands() -> list[str]:
    return sorted(
        {line.split("  #")[0].strip() for page in PAGES for line in COMMAND.findall(page.read_text())}
    )


def test_there_are_pages_and_commands() -> None:
    assert len(PAGES) >= 6
    assert len(commands()) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
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


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_method.py").write_text(method_text("my_method.py", "MyMethod"))
    name, *arguments = shlex.split(command)[1:]
    subcommand = cli.get_command(None, name)  # type: ignore[arg-type]
    assert subcommand is not None
    if isinstance(subcommand, click.Group):
        name, *arguments = arguments
        subcommand = subcommand.commands[name]
    if "--help" in arguments:
        return
    context = subcommand.make_context(name, arguments)
    for assignment in context.params.get("assignments") or ():
        key = next(iter(parse_assignments([assignment])))
        assert key in TABLES or key in Settings.__dataclass_fields__
    named = context.params.get("methods") or context.params.get("method")
    parse_methods(named or "fedavg")


def test_every_file_named_in_the_architecture_exists() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    house = text.split("```")[1]
    for name in re.findall(r"^  ([\w/.]+)", house, re.M):
        assert (ROOT / "src/fedcsd" / name).exists(), name
    named = set(re.findall(r"[\w]+\.py", house)) | {"__init__.py", "__main__.py"}
    for path in (ROOT / "src/fedcsd").glob("*.py"):
        assert path.name in named, f"docs/architecture.md does not show {path.name}"


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text()], ids=lambda p: p.name)
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.S)).replace(
        "rounds=30", "rounds=2"
    )
    exec(compile(code, page.name, "exec"), {})


def test_the_experiment_of_the_readme_is_valid(tmp_path: Path) -> None:
    from fedcsd.experiments import prepare

    (tmp_path / "experiment.toml").write_text(
        re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    )
    experiment = prepare(layered(read_toml(tmp_path / "experiment.toml")))
    assert experiment.settings.lr == 0.1
    prepare(layered(read_toml(ROOT / "demo.toml"), {"method": "fedcsd"}))


def test_the_pages_of_methods_have_the_options_of_the_code_and_the_numbers_of_the_results() -> None:
    from method_pages import stale

    assert stale() == [], "run python benchmarks/method_pages.py"
