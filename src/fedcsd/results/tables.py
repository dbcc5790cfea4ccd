"""The table of a comparison: as text for the terminal, as Markdown, LaTeX and CSV, all from the same rows."""

import csv
import io
import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedcsd.config.options import toml_text
from fedcsd.errors import Divergence, UserError

GUESSING = 0.1  # so little of what guessing gets right, or gets wrong if that is less, is no learning
PER_SEED = ("accuracies", "differences", "own")


@dataclass(frozen=True)
class Row:
    """One method's results over the seeds; lists have one entry a seed."""

    label: str
    accuracies: list[float]
    """final test accuracy of each seed, in percent; NaN for a run that diverged"""
    differences: list[float]
    """the same less the first method's, seed by seed; NaN where one of the two diverged"""
    drift: float | None
    """mean logit drift over rounds and finished runs, where it was tracked"""
    megabytes: float | None
    """sent in a finished run, both ways together"""
    best: float | None
    """mean over finished runs of the best round's accuracy; not the result"""
    seconds: float | None = None
    """of a finished run"""
    own: list[float] = field(default_factory=list)
    """accuracy on the clients' own test data in percent, mean over clients; empty if nothing was measured"""
    personal: bool = False
    """whether `own` is of each client's own model, not of the global one"""
    diverged: list[Divergence | None] = field(default_factory=list)
    """how each run ended: None for one that is finished"""
    notes: list[str] = field(default_factory=list)
    """what a reader should know of single runs"""
    mended: bool = False
    """whether a run had its settings changed in mid-run, after a divergence"""
    other_code: bool = False
    """whether a run was trained, wholly or partly, with other code than the method's own file has now"""
    blew_up: bool = False
    """whether a run ended with a loss that is finite and meaningless"""
    untrained: bool = False
    """whether a part of the global model is trained by the clients for themselves only, as in FedPer"""
    shared: dict[str, Any] = field(default_factory=dict)
    """options that were given for all methods together (--set method.…) and change this one"""
    guess: float = 0.0
    """accuracy of always naming the largest class of the test data, in percent; 0 if that is not known"""

    @property
    def accuracy(self) -> str:
        return accuracy_cell(self, PLAIN)

    @property
    def difference(self) -> str:
        return difference_cell(self, PLAIN)

    @property
    def marked(self) -> bool:
        """Whether a run is not what its row says."""
        return self.mended or self.other_code or self.blew_up

    @property
    def guessing(self) -> bool:
        """Whether its global models learned nothing, as far as their accuracy shows."""
        values = [] if self.personal or self.untrained else known(self.accuracies)
        margin = GUESSING * min(self.guess, 100 - self.guess)
        return bool(values) and self.guess > 0 and mean(values) <= self.guess + margin

    def whole(self, values: Sequence[float]) -> bool:
        """Whether every seed has a result that was trained as asked."""
        return not self.marked and not self.guessing and bool(values) and all(map(math.isfinite, values))

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        for name in PER_SEED:  # JSON has no NaN
            content[name] = [v if math.isfinite(v) else None for v in content[name]]
        return content

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Row":
        content = dict(content)
        for name in PER_SEED:
            content[name] = [math.nan if v is None else v for v in content.get(name, [])]
        content["diverged"] = [d and Divergence(**d) for d in content.get("diverged", [])]
        return cls(**content)


def load_rows(path: Path) -> tuple[list[Row], list[int], dict[str, Any]]:
    """The rows, seeds and settings of a comparison that was written."""
    file = path / "comparison.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return [Row.from_json(row) for row in content["rows"]], content["seeds"], content.get("settings", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file} is damaged: the same comparison again writes it anew") from None


def one_line(text: str) -> str:
    return " ".join(text.split())


def latex_text(text: str) -> str:
    """Text as LaTeX shows it, in a document without any package for it."""
    special = {c: f"\\{c}" for c in "&%$#_{}"} | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
    }

    def one(c: str) -> str:
        name = unicodedata.name(c, "")
        if name.startswith("GREEK SMALL LETTER ") and name.count(" ") == 3:
            letter = name.split()[-1].lower()
            return {"omicron": "o", "lamda": r"$\lambda$"}.get(letter, f"$\\{letter}$")
        return special.get(c, c)

    escaped = "".join(map(one, one_line(text).replace("µ", "μ")))
    return re.sub("-(?=-)", "-{}", escaped)  # two hyphens would become one dash


RAISED = str.maketrans("abcdefghij", "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲ")


@dataclass(frozen=True)
class Style:
    """How one kind of table writes what stands in its cells."""

    text: Callable[[str], str]
    number: Callable[[str, bool], str]
    """a number with its deviation, as `96.85 ± 1.12`; in bold or not"""
    nothing: str
    mark: str
    raised: Callable[[str], str] = lambda letter: letter.translate(RAISED)
    """the letter of a footnote"""


def _latex_number(number: str, best: bool) -> str:
    number = number.replace("±", r"\pm")
    return f"$\\mathbf{{{number}}}$" if best else f"${number}$"


PLAIN = Style(str, lambda number, best: number, "–", " †")
MARKDOWN = Style(
    lambda text: one_line(text).replace("|", "\\|"),
    lambda number, best: f"**{number}**" if best else number,
    "–",
    " †",
)
LATEX = Style(latex_text, _latex_number, "--", r"\,$^\dagger$", lambda letter: f"$^{letter}$")


def known(values: Sequence[float]) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean ± standard deviation over seeds; one seed has no deviation."""
    text = f"{mean(values):{sign}.2f}"
    return f"{text} ± {stdev(values):.2f}" if len(values) > 1 else text


def accuracy_cell(row: Row, style: Style, best: bool = False) -> str:
    values, ends = known(row.accuracies), [end.round for end in row.diverged if end]
    if not values:
        first, last = min(ends, default=0), max(ends, default=0)
        return f"diverged (round {first})" if first == last else f"diverged (rounds {first} to {last})"
    text = style.number(spread(values), best) + (style.mark if row.marked else "")
    return f"{text} ({len(ends)} of {len(row.accuracies)} diverged)" if ends else text


def difference_cell(row: Row, style: Style) -> str:
    """The paired difference; says over how many seeds where it is fewer than the accuracy has."""
    pairs = known(row.differences)
    if not pairs:
        return style.nothing
    text = style.number(spread(pairs, "+"), False)
    if len(pairs) < len(known(row.accuracies)):
        text += f" ({len(pairs)} of {len(row.differences)} seeds)"
    return text


def best_of(rows: Sequence[Row], what: str = "accuracies") -> list[bool]:
    """Which rows have the highest accuracy (or `own`), as it is shown. A mean that leaves out what
    diverged, or has a run in it that is not what its row says, is not compared."""
    values: list[list[float]] = [getattr(row, what) for row in rows]
    whole = [row.whole(some) for row, some in zip(rows, values, strict=True)]
    shown = [f"{mean(some):.2f}" if ok else "-inf" for some, ok in zip(values, whole, strict=True)]
    top = max(shown, key=float)
    several = sum(map(bool, values)) > 1
    return [several and ok and text == top for ok, text in zip(whole, shown, strict=True)]


def table(rows: Sequence[Row], style: Style = PLAIN) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the comparison; what was not measured, or has nothing to be compared with, has no column."""

    def number(value: float | None, digits: int = 2) -> str:
        return style.nothing if value is None else style.number(f"{value:.{digits}f}", False)

    tracked, own = any(row.drift is not None for row in rows), any(row.own for row in rows)
    several = len(rows) > 1
    head = ["method", "accuracy (%)"] + [f"vs {rows[0].label}"] * several
    head += ["own data (%)"] * own + ["logit drift"] * tracked + ["sent (MB)", "best (%)"]
    cells = []
    for row, best, best_own in zip(rows, best_of(rows), best_of(rows, "own"), strict=True):
        cell = [style.text(row.label), accuracy_cell(row, style, best)]
        cell += ["" if row is rows[0] else difference_cell(row, style)] * several
        if own:
            values = known(row.own)
            cell.append(style.number(spread(values), best_own) if values else style.nothing)
        cell += [number(row.drift, 3)] * tracked
        cells.append([*cell, number(row.megabytes), number(row.best)])
    return [style.text(name) for name in head], cells


def captions(rows: Sequence[Row], seeds: Sequence[int]) -> list[str]:
    """What the columns are, a line each."""
    over = f"seed {seeds[0]}"
    if len(seeds) > 1:
        over = (
            f"mean ± standard deviation over seeds {', '.join(map(str, seeds))}"
            + "; differences paired by seed" * (len(rows) > 1)
        )
    lines = [f"accuracy of the final round, {over}"]
    if any(row.own for row in rows):
        lines += _own_captions(rows)
    if any(row.drift is not None for row in rows):
        lines.append(
            "logit drift: KL(global ‖ local) after local training, mean over all rounds; sent: both ways, all rounds"
        )
    reasons = {
        "settings were changed after a divergence": any(row.mended for row in rows),
        "rounds, some or all, were trained with other code of the method or model than there is now": any(
            row.other_code for row in rows
        ),
        "loss blew up": any(row.blew_up for row in rows),
    }
    if any(reasons.values()):
        said = " or ".join(reason for reason, holds in reasons.items() if holds)
        lines.append(f"†: with runs whose {said}; never counted as the best")
    return lines


def _own_captions(rows: Sequence[Row]) -> list[str]:
    where = "on each client's own test data, mean over clients"
    if not any(row.personal for row in rows):
        return [f"own data: the global model {where}"]
    lines = [
        f"own data: each client's own model where the method has one, else the global model, {where}",
        "personalised methods, which give each client a model of its own, are to be compared by own data",
    ]
    if labels := [row.label for row in rows if row.untrained]:
        lines.append(
            f"accuracy of {' and '.join(labels)}: of a global model in which the part that stays with the clients is untrained"
        )
    return lines


def settings_line(settings: Mapping[str, Any], seeds: Sequence[int]) -> str:
    """What was compared on, in one line."""
    return f"settings: {in_words(settings)}; seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def in_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {toml_text(value)}" for key, value in settings.items())


def legend(rows: Sequence[Row], seeds: Sequence[int], settings: Mapping[str, Any]) -> list[str]:
    """What stands below the table, a line each: what the columns are, and on what was compared."""
    return [*captions(rows, seeds), *([settings_line(settings, seeds)] if settings else [])]


def remarks(rows: Sequence[Row], text: Callable[[str], str] = str, mark: str = "") -> list[str]:
    """What a reader should know of single methods and runs, a line each."""
    given: dict[str, list[str]] = {}
    for row in rows:
        if row.shared:
            given.setdefault(_assigned(row.shared), []).append(text(row.label))
    notes = [f"with {options} for {', '.join(labels)}" for options, labels in given.items()]
    if guessing := [text(row.label) for row in rows if row.guessing]:
        notes.append(
            f"no better than guessing ({rows[0].guess:.1f} %): {', '.join(guessing)}; more rounds, another "
            "learning rate or another model may help"
        )
    return notes + [f"{mark * row.marked}{text(row.label)}, {note}" for row in rows for note in row.notes]


def _assigned(options: Mapping[str, Any]) -> str:
    return ", ".join(f"method.{key}={value}" for key, value in options.items())


def markdown(rows: Sequence[Row], seeds: Sequence[int], settings: Mapping[str, Any]) -> str:
    head, cells = table(rows, MARKDOWN)
    lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *cells)]
    below = [*legend(rows, seeds, settings), *remarks(rows, MARKDOWN.text, "† ")]
    return "\n".join([*lines, "", *(f"- {one_line(line)}" for line in below)]) + "\n"


def latex(rows: Sequence[Row], seeds: Sequence[int], settings: Mapping[str, Any]) -> str:
    """A tabular to \\input into a document that uses booktabs."""
    head, cells = table(rows, LATEX)
    comments = [r"needs \usepackage{booktabs}", *legend(rows, seeds, settings), *remarks(rows)]
    lines = [*(f"% {one_line(line)}" for line in comments), *tabular(head, cells)]
    return "\n".join(lines) + "\n"


def tabular(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a tabular: the first column text, the others numbers."""
    return [
        f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
        " & ".join(head) + r" \\",
        r"\midrule",
        *(" & ".join(line) + r" \\" for line in cells),
        r"\bottomrule",
        r"\end{tabular}",
    ]


def csv_text(rows: Sequence[Row]) -> str:
    """A line for each method; what there is no number for is empty."""
    return csv_lines([_csv_line(row) for row in rows])


def csv_lines(lines: Sequence[Mapping[str, Any]]) -> str:
    """Lines with the same keys, those of the first as head."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def _csv_line(row: Row) -> dict[str, Any]:
    def both(name: str, values: Sequence[float]) -> dict[str, Any]:
        values = known(values)
        return {
            f"{name}_mean": round(mean(values), 6) if values else "",
            f"{name}_std": round(stdev(values), 6) if len(values) > 1 else "",
        }

    def one(value: float | None) -> Any:
        return "" if value is None else round(value, 6)

    return {
        "method": row.label,
        "seeds": len(row.accuracies),
        "diverged": sum(end is not None for end in row.diverged),
        **both("accuracy", row.accuracies),
        **both("difference", row.differences),
        "difference_seeds": len(known(row.differences)),
        **both("own_data", row.own),
        "own_data_model": ("personal" if row.personal else "global") if row.own else "",
        "logit_drift": one(row.drift),
        "megabytes": one(row.megabytes),
        "seconds": one(row.seconds),
        "best_accuracy": one(row.best),
        "marked": "yes" if row.marked else "",
        "notes": "; ".join([*([f"with {_assigned(row.shared)}"] if row.shared else []), *row.notes]),
    }
