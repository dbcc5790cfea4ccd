"""Write the options and measured numbers of each method into its page of docs/methods/.

    python studies/method_pages.py            # rewrite the generated parts
    python studies/method_pages.py --check    # only say whether they are up to date

Options come from the code, numbers from results/methods/ (see studies/methods.py).
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from methods import text

from fedcsd.config.options import describe
from fedcsd.methods import methods

ROOT = Path(__file__).parents[1]
SETS = {
    "mnist.json": "MNIST, simple CNN",
    "cifar100.json": "CIFAR-100, simple CNN",
    "cifar100-resnet18.json": "CIFAR-100, ResNet-18 (with BatchNorm)",
}
Rows = list[dict[str, Any]]


def options_of(name: str) -> str:
    cls = methods.load(name)
    rows = [f"| `{key}` | {default} | {meaning} |" for key, default, meaning in describe(cls)]
    found = "\n".join(["| option | default | meaning |", "|---|---|---|", *rows]) if rows else "It has none."
    presets = [
        f"| `{name}:{preset}` | {', '.join(f'`{k}={str(v).lower()}`' for k, v in chosen.items())} |"
        for preset, chosen in cls.presets.items()
    ]
    if presets:
        found += "\n\nPresets:\n\n" + "\n".join(["| preset | means |", "|---|---|", *presets])
    return found


def measured(name: str) -> str:
    parts = []
    for file, title in SETS.items():
        path = ROOT / "results" / "methods" / file
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            parts += tables(name, file, title, content)
    return "\n\n".join(parts) or "Not measured yet."


def tables(name: str, file: str, title: str, content: dict[str, Any]) -> list[str]:
    """Return the numbers of a method in one results file, beside FedAvg's."""
    rows: Rows = content["rows"]
    labels = [
        m
        for m in dict.fromkeys(row["method"] for row in rows)
        if m == "fedavg" or m.partition(":")[0] == name
    ]
    if len(labels) == 1 and name != "fedavg":
        return []
    seeds = sorted({run["seed"] for row in rows for run in row["runs"]})
    settings = content["settings"]
    size = f"{settings['train_size']:,} training images, " if settings.get("train_size") else ""
    epochs = f"{settings['rounds']} rounds of {settings['epochs']} epoch{'s' * (settings['epochs'] > 1)}"
    clients = settings.get("clients", 10)
    over = f"mean ± standard deviation over seeds {', '.join(map(str, seeds))} (`results/methods/{file}`):"
    head = f"{title}: {size}{clients} clients, {epochs}; final test accuracy in percent, {over}"
    found = [head, grid(rows, labels, "accuracy")]
    if any("client_accuracy_personal" in run for row in rows for run in row["runs"] if row["method"] == name):
        found += [
            "Each client on its own data, the global model for FedAvg and the client's own for this method"
            f"{content.get('own_data', '')}:",
            grid(rows, labels, own),
        ]
    return found


def own(run: dict[str, Any]) -> float | None:
    value: float | None = run.get("client_accuracy_personal", run.get("client_accuracy"))
    return value


def grid(rows: Rows, labels: list[str], key: str | Callable[[dict[str, Any]], float | None]) -> str:
    columns = sorted({(row["beta"], row["lr"]) for row in rows})
    most = max(len(row["runs"]) for row in rows)
    betas = len({beta for beta, _ in columns}) > 1
    lines = [
        "| | " + " | ".join(f"β {b:g}, lr {lr:g}" if betas else f"lr {lr:g}" for b, lr in columns) + " |"
    ]
    lines.append("|---" * (len(columns) + 1) + "|")
    for label in labels:
        cells = {}
        for row in (r for r in rows if r["method"] == label):
            runs = [{**run, "shown": key(run) if callable(key) else run.get(key)} for run in row["runs"]]
            fewer = f" ({len(runs)} seeds)" if len(runs) < most else ""
            cells[row["beta"], row["lr"]] = text(runs, "shown") + fewer.replace("(1 seeds)", "(1 seed)")
        lines.append(f"| {label} | " + " | ".join(cells.get(c, "") for c in columns) + " |")
    return "\n".join(lines)


def filled(page: str, name: str) -> str:
    for what, make in (("options", options_of), ("measured", measured)):
        block = f"<!-- {what}: generated -->\n{make(name)}\n<!-- end -->"
        page, found = re.subn(
            rf"<!-- {what}: generated -->\n.*?<!-- end -->",
            block.replace(chr(92), chr(92) * 2),
            page,
            flags=re.S,
        )
        assert found == 1, f"docs/methods/{name}.md needs one block <!-- {what}: generated --> … <!-- end -->"
    return page


def stale(*, rewrite: bool = False) -> list[str]:
    """The methods whose page is not up to date; rewritten if told."""
    found = []
    for name in methods.names:
        path = ROOT / "docs" / "methods" / f"{name}.md"
        before = path.read_text(encoding="utf-8")
        after = filled(before, name)
        if before != after:
            found.append(name)
            if rewrite:
                path.write_text(after, encoding="utf-8")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    found = stale(rewrite=not check)
    print(f"{'out of date' if check else 'rewritten'}: {', '.join(found) or 'none'}")
    sys.exit(bool(check and found))


if __name__ == "__main__":
    main()
