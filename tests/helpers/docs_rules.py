"""The rules change the documentation's commands in tests. A command that no rule matches runs unchanged.

A rule looks at one command as it is typed. All that match are applied, from top to bottom:
`add` appends arguments (a later option goes over an earlier one), `swap` replaces text in arguments, and
`how` says how far the command goes:

    run     to its end
    check   everything but the training: settings, data, partition, model and method are made, then it ends
    parse   the command line is read and every setting and method in it checked; nothing is loaded
    recipe  the target exists, and the fedcsd commands of its recipe are run by these rules
    leave   only its place is taken
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

DATA = os.environ.get("FEDCSD_DATA", "")
SHORT = "--set rounds=2 --set epochs=1"
STRENGTH = ("run", "recipe", "check", "parse", "leave")


@dataclass(frozen=True)
class Rule:
    pattern: str
    why: str
    add: str = ""
    swap: dict[str, str] = field(default_factory=dict)
    how: str = "run"
    unless: str = ""

    def matches(self, command: str) -> bool:
        return bool(re.search(self.pattern, command)) and not (
            self.unless and re.search(self.unless, command)
        )


PUBLISHED = "mnist|fashion_mnist|cifar10|cifar100|femnist|office_caltech_10"
HERE = "|".join(name for name in PUBLISHED.split("|") if DATA and (Path(DATA) / name).is_dir())

RULES = (
    Rule("^fedcsd (run|compare) ", "that it works shows in two short rounds", add=SHORT, unless="--help"),
    Rule("^fedcsd compare ", "one seed does what three do", add="--seeds 0"),
    Rule("--methods all", "22 methods: one round each", add="--set rounds=1 --set train_size=300"),
    Rule("^fedcsd run$", "that it works shows in two short rounds", add=SHORT),
    Rule("^fedcsd resume .*--rounds", "one round more is longer, too", add="--rounds 3"),
    Rule("^fedcsd drift ", "one local epoch on few images", add="--epochs 1 --images 100"),
    Rule("^fedcsd tsne ", "few points, one local epoch", add="--epochs 1 --samples 60"),
    Rule("^fedcsd watch ", "serves until it is stopped: test_report_browser.py does that", how="parse"),
    Rule("^fedcsd deploy local", "starts a SuperLink and SuperNodes: tests/deploy does that", how="parse"),
    Rule("--mlflow http", "no tracking server is there: test_tracking.py tracks into a file", how="parse"),
    Rule("--data-dir", "where the data is here", swap={"/data": DATA or "/data"}),
    Rule("--data-dir", "not in FEDCSD_DATA here", how="run" if DATA else "parse"),
    Rule("--device cuda", "there may be no GPU", swap={"cuda": "cpu", "bf16": "fp32", "--compile": "--no-compile"}),
    Rule(rf"^fedcsd .*--data ({PUBLISHED})\b", "few images do", add="--set train_size=2000 --set min_samples=1", unless="office|femnist"),
    Rule(rf"^fedcsd .*--data ({PUBLISHED})\b", "not in FEDCSD_DATA here", how="parse", unless=rf"--data ({HERE or 'none'})( |$)"),
    Rule(r"--data hub:", "nothing is fetched", how="parse"),
    Rule("--model resnet(18|50)|office_caltech_10", "minutes a round on a CPU", how="check"),
    Rule("^fedcsd reproduce .", "hours of training: the plan is made", add="--dry-run", unless="smoke|--no-train|--dry-run"),
    Rule("^fedcsd reproduce .", "not in FEDCSD_DATA here", how="run" if DATA else "parse", unless="smoke"),
    Rule("^fedcsd reproduce .*smoke", "one run of 48", add="--only method=fedavg,data=femnist,beta=0.05 --set rounds=1"),
    Rule("--out results/", "would write into the repository: tests/paper/test_committed.py does that", how="parse"),
    Rule("^python studies/target.py", "one seed, one round", add="--rounds 1 --train-size 300 --seeds 0 --mus 0.01"),
    Rule("^python studies/target.py .*--data mnist", "not in FEDCSD_DATA here", how="run" if "mnist" in HERE.split("|") else "parse"),
    Rule("^python (benchmarks|studies)/", "measures for minutes", how="parse", unless="target.py|method_pages.py"),
    Rule("^python tools/", "test_site.py runs it, without keeping what it gives", how="leave"),
    Rule("--method pulled", "a package that the page has made up", how="leave"),
    Rule("^make ", "the demo's commands are run; the others are what .ci/run does", how="recipe"),
    Rule("^(pip|git|source|cd) ", "nothing is installed or fetched, and all happens in one folder", how="leave"),
)  # fmt: skip

PYTHON = (
    ("rounds=30", "rounds=2", "that it works shows in two rounds"),
    ("rounds=20", "rounds=2", "that it works shows in two rounds"),
)

GIVEN = ("demo.toml", "Makefile", "benchmarks", "studies", "results")
"""What lies in the folder of somebody who follows a page in a copy of the repository."""


def environed(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that a page sets for a command, with the folder of this machine's data for /data."""
    return {key: DATA if value == "/data" and DATA else value for key, value in environment.items()}


def ruled(command: list[str]) -> tuple[list[str], str]:
    """The command as the tests run it, and how far."""
    text, how = " ".join(command), "run"
    for rule in (rule for rule in RULES if rule.matches(text)):
        for old, new in rule.swap.items():
            command = [re.sub(rf"(?<![\w.-]){re.escape(old)}\b", new, part) for part in command]
        command = [*command, *rule.add.split()]
        how = max(how, rule.how, key=STRENGTH.index)
    return command, how


def shortened(code: str) -> str:
    for old, new, _ in PYTHON:
        code = code.replace(old, new)
    return code
