"""Every command and every piece of Python in the documentation is run (docs_rules.py says what is changed)."""

import shlex
from pathlib import Path

import pytest

from fedcsd.cli.new_method import method_text
from fedcsd.errors import UserError
from helpers.docs_pages import ROOT, blocks, carry_out, follow, inline
from helpers.docs_rules import RULES, ruled

pytestmark = pytest.mark.docs
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TYPED = [page for page in PAGES if list(blocks(page.read_text(encoding="utf-8")))]
COMMANDS = sorted({command for page in PAGES for command in inline(page.read_text(encoding="utf-8"))})


@pytest.mark.parametrize("page", TYPED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_can_be_followed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow(page, tmp_path)


def test_commands_within_sentences_are_right(tmp_path: Path) -> None:
    for name in ("benchmarks", "studies"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my_method.py").write_text(method_text("my_method.py", "MyMethod"))
    assert len(COMMANDS) > 20
    for command in COMMANDS:
        status, said = carry_out(shlex.split(command), {}, tmp_path, how="parse")
        assert status == 0, said


def test_all_kinds_of_blocks_are_found() -> None:
    page = """# A page

    fedcsd list models     # with a comment
    fedcsd list partitions

Text, and a table that is no command:

    │ fedcsd │ 97.41 │

```console
$ fedcsd list methods
what it prints
```

```sh
for x in 1 2; do
  echo $x
done
```

```toml
# some.toml
lr = 1
```

```python
# mine.py
x = 1
```
"""
    found = {block.line: block.kind for block in blocks(page)}
    assert found == {3: "shell", 11: "shell", 16: "shell", 22: "file", 27: "python"}
    assert [block.file for block in blocks(page) if block.file] == ["some.toml", "mine.py"]
    sentence = "Say `fedcsd show runs/x`, `fedcsd resume RUN`, `fedcsd plot …` or `lr`."
    assert inline(sentence) == ["fedcsd show runs/x"]


BAD = {
    "an option that there is not": "    fedcsd run --data digits --learning-rate 0.1\n",
    "a value that cannot be": "    fedcsd run --data digits --set lr=-1\n",
    "a setting that there is not": "    fedcsd run --set learning_rate=0.1\n",
    "a file that there is not": "    fedcsd run missing.toml\n",
    "a run that nobody made": "    fedcsd show runs/first\n",
    "a method's option": "    fedcsd run --method fedprox:nu=1\n",
    "a command": "    fedcsd walk\n",
    "a wrong option where nothing is trained": "    fedcsd run --data cifar100 --model resnet50 --devise cuda\n",
    "a wrong method where nothing is trained": "    fedcsd run --data hub:some/thing --method fedcsv\n",
    "a benchmark's option": "    python benchmarks/peers/compare.py --work-load W1\n",
    "a benchmark": "    python benchmarks/nothing.py\n",
    "a target of make": "    make dmo\n",
    "a program": "```sh\nno-such-program\n```\n",
    "the second line": "    fedcsd list models\n    fedcsd list network\n",
    "within a loop": "```sh\nfor b in 0 1; do\n  fedcsd partition --beta $b\ndone\n```\n",
    "Python": "```python\nimport fedcsd\n\nfedcsd.run(learning_rate=1)\n```\n",
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_page_is_found_out(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text(f"# Bad\n\n{BAD[what]}")
    with pytest.raises((AssertionError, UserError)):
        follow(tmp_path / "page.md", tmp_path)


def test_a_good_page_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text(
        "    fedcsd run --out runs/a\n    fedcsd show runs/a\n\n```python\nimport fedcsd\n"
        "rounds = len(fedcsd.load_run('runs/a').history)\nassert rounds == 2\n```\n\n    fedcsd run nothing.toml || true\n"
    )
    follow(tmp_path / "page.md", tmp_path)


def test_rules_change_what_they_say() -> None:
    assert ruled(["fedcsd", "list", "methods"]) == (["fedcsd", "list", "methods"], "run")
    assert ruled(["fedcsd", "show", "runs/cuda"])[0] == ["fedcsd", "show", "runs/cuda"]
    command, how = ruled(shlex.split("fedcsd run --device cuda --model resnet50 --precision bf16 --compile"))
    assert command[2:4] == ["--device", "cpu"]
    assert "--no-compile" in command
    assert "fp32" in command
    assert how == "check"
    assert ruled(["pip", "install", "."])[1] == "leave"


def test_every_rule_is_of_use() -> None:
    """A rule that matches nothing any more is removed."""
    found = [block.text for page in TYPED for block in blocks(page.read_text(encoding="utf-8"))]
    lines = [line.partition("  #")[0].strip() for text in found for line in text.split("\n")]
    for rule in (rule for rule in RULES if "not in FEDCSD_DATA" not in rule.why):
        assert any(rule.matches(line) for line in [*lines, *COMMANDS]), rule.pattern
