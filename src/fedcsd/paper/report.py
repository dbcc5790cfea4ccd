"""Describe a measured table or figure: its cells, and the sentences about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedcsd.experiments.running import Run
from fedcsd.experiments.summary import notable
from fedcsd.paper.exhibits import BETA_OPEN, TITLES, Exhibit, Point
from fedcsd.paper.measured import (
    HIGHER_IS_BETTER,
    Result,
    SectionResults,
    apart,
    best_in,
    measure,
    nearer_pool,
    order_of,
)
from fedcsd.paper.plan import Plan, PlannedRun
from fedcsd.paper.scales import Choices
from fedcsd.results.comparison import in_words
from fedcsd.results.tables import NOTHING, Cell, Mark, Number, Part, Table, known, spread

LETTERS = "abcdefghij"
DIGITS = {"megabytes": ".2f", "target_entropy": ".4f"}  # of measures without a deviation


@dataclass(frozen=True)
class PictureTable:
    """A table of the numbers that only a picture shows."""

    name: str
    """part of its file's name"""
    title: str
    table: Table


@dataclass(frozen=True)
class Report:
    """A table or figure with its runs and measured numbers."""

    exhibit: Exhibit
    choices: Choices
    plan: Plan
    runs: Mapping[tuple[Point, int], Run]
    """runs that have ended"""
    pictured: Sequence[PictureTable] = ()

    @classmethod
    def of(cls, exhibit: Exhibit, choices: Choices, plan: Plan) -> "Report":
        return cls(
            exhibit,
            choices,
            plan,
            {key: run for key, some in plan.items() if (run := some.run()) is not None},
        )

    @property
    def paths(self) -> dict[tuple[Point, int], Path]:
        """Return the paths of the runs that have ended."""
        return {key: self.plan[key].path for key in self.runs}

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(seed for _, seed in self.plan))

    @cached_property
    def sections(self) -> list[SectionResults]:
        return [
            SectionResults(part, tuple(measure(entry, self.seeds, self.runs) for entry in part.entries))
            for part in self.exhibit.sections
        ]

    @property
    def results(self) -> list[Result]:
        return [result for section in self.sections for result in section.results]

    @property
    def comparable(self) -> bool:
        """Tell if the models are trained well enough to compare their numbers."""
        return self.choices.scale != "smoke"

    @property
    def missing(self) -> list[PlannedRun]:
        return list({run.path: run for key, run in self.plan.items() if key not in self.runs}.values())

    @cached_property
    def doubts(self) -> dict[str, str]:
        """Return a letter for each reason not to trust a printed number."""
        reasons = dict.fromkeys(_doubt(result) for result in self.results if result.entry.suspect)
        return dict(zip(reasons, LETTERS, strict=False))

    def in_place(self, text: str, data: str) -> str:
        """Return a text that names a data set, with the data in its place."""
        other = self.choices.stand_ins.get(data)
        return f"{text} ({other} in its place)" if other and TITLES[data] in text else text

    def title(self, section: SectionResults) -> str:
        return self.in_place(section.section.title, section.section.entries[0].point.data)


def _doubt(result: Result) -> str:
    entry = result.entry
    return f"{entry.row}, {entry.column}: {entry.suspect}"


def table(report: Report, section: SectionResults) -> Table:
    """Return the table of a section."""
    rows, columns, best = section.section.rows, section.section.columns, {}
    for column in columns:
        compared = [r for r in section.column(column) if r.entry.measure in HIGHER_IS_BETTER]
        best[column] = best_in(compared) if report.comparable else set()
    lines: list[list[Cell]] = []
    for row in rows:
        found = {r.entry.column: r for r in section.results if r.entry.row == row}
        data = next(iter(found.values())).entry.point.data
        cells = [cell(report, found[c], row in best[c]) if c in found else NOTHING for c in columns]
        lines.append([report.in_place(row, data), *cells])
    return Table([section.section.head, *columns], lines)


def cell(report: Report, result: Result, best: bool = False) -> Cell:
    """Return measured, printed and the difference: `58.61 ± 0.40 (58.50, +0.11)`."""
    parts, printed = measured(result, best), result.entry.printed
    if printed is None:
        return parts
    parts += [" (", Number(f"{printed:.2f}")]
    if result.entry.suspect:
        parts.append(Mark(report.doubts[_doubt(result)]))
    if result.difference is not None and report.comparable:
        parts += [", ", Number(f"{result.difference:+.2f}")]
    return [*parts, ")"]


def measured(result: Result, best: bool = False) -> list[Part]:
    """Return the measured number of a cell, with the seeds that lack one."""
    values, ends = known(result.values), [end.round for end in result.ends if end]
    if not values:
        if not ends:
            return [NOTHING]
        rounds = f"round {ends[0]}" if len(set(ends)) == 1 else f"rounds {min(ends)} to {max(ends)}"
        return [f"diverged ({rounds})"]
    digits, of = DIGITS.get(result.entry.measure), len(result.seeds)
    shown = Number(format(result.mean, digits) if digits else spread(values), best)
    text = f" ({len(ends)} of {of} diverged)" * bool(ends)
    text += f" ({len(values)} of {of} seeds)" * bool(result.missing)
    return [shown, *[Mark("†")] * bool(result.notes), text]


def order_lines(report: Report, pairs: bool = True) -> list[str]:
    """Return for each column with printed numbers how its order compares with the paper's.

    Without `pairs` the reversed pairs are not named.
    """
    lines = []
    for section in report.sections:
        for column in section.section.columns:
            results = [r for r in section.column(column) if r.entry.printed is not None]
            whole = [r.entry.row for r in results if r.whole]
            if len(whole) < 2:
                continue
            among = f"among {_and(whole)}, which have every seed: " if len(whole) < len(results) else ""
            text = among + order_text(results, pairs)
            if len(whole) > 2:
                text += f"; best here {_best(results)}, in the paper {_printed_best(results)}"
            lines.append(f"{report.title(section)}, {column}: {text}")
    return lines


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def order_text(results: Sequence[Result], pairs: bool = True) -> str:
    """Return how the order of a column compares with the printed one."""
    order = order_of(results)
    if order.tau is None:
        return "no order, all are equal"
    if not order.differ:
        return f"order holds in {f'all {order.compared} pairs' if order.compared > 1 else 'the one pair'}"
    text = f"order differs, {order.agree} of {order.compared} pairs are as in the paper (Kendall's τ {order.tau:+.2f})"
    if not pairs:
        return text
    above: dict[str, list[str]] = {}
    for first, second in order.differ:
        if (first, second) not in order.unclear:
            above.setdefault(_short(second), []).append(_short(first))
    reversed_ = [f"{winner} above {', '.join(others)}" for winner, others in above.items()]
    if order.unclear:
        few = len(order.unclear)
        reversed_.append(f"{few} pair{'s' * (few > 1)} within the spread of the seeds")
    return f"{text}, reversed: {'; '.join(reversed_)}"


def _short(row: str) -> str:
    """Return `M1` for `M1: similarity, mask`."""
    return row.partition(":")[0]


def _best(results: Sequence[Result]) -> str:
    best = best_in(results)
    if len(best) > 3:
        return f"{len(best)} rows alike"
    return " and ".join(r.entry.row for r in results if r.entry.row in best) or "open"


def _printed_best(results: Sequence[Result]) -> str:
    """Return the best row in the paper; where the paper states two numbers, the lower one counts."""
    lower = {
        r.entry.row: min(r.entry.printed, r.entry.implied or r.entry.printed)
        for r in results
        if r.whole and r.entry.printed is not None
    }
    return " and ".join(row for row, value in lower.items() if value == max(lower.values()))


def legend(report: Report) -> list[str]:
    """Return the lines that explain the numbers."""
    seeds, points = report.seeds, report.exhibit.points
    over = f"seed {seeds[0]}" if seeds else "no seed"
    if len(seeds) > 1:
        over = f"mean ± standard deviation over seeds {', '.join(map(str, seeds))}"
    printed = any(result.entry.printed is not None for result in report.results)
    brackets = f"; in brackets: printed{', difference' * report.comparable}" * printed
    lines = [f"final round, {over}{brackets}"]
    if report.exhibit.first_seed_only and len(report.choices.seeds) > 1:
        lines.append("only the first seed is shown")
    lines.append(report.choices.text)
    used = {point.data for point in points}
    lines += [note for data, note in report.choices.notes.items() if data in used]
    skewed = any(point.beta is not None for point in points)
    return [*lines, *(remark for remark in report.exhibit.remarks if skewed or remark != BETA_OPEN)]


def settings_lines(report: Report) -> list[str]:
    """Return the settings that all runs on a data set have in common."""
    lines = []
    for data, title in TITLES.items():
        runs = [run for (point, _), run in report.runs.items() if point.data == data]
        for run in runs[:1]:
            config = dict(run.settings)
            if isinstance(config["data"], Mapping):  # the pool is not common to all
                config["data"] = {key: value for key, value in config["data"].items() if key != "train_pool"}
            shown = {k: value for k, value in notable(config).items() if k not in ("beta", "track_drift")}
            lines.append(f"{title}: {in_words(shown)}")
    return lines


def findings(report: Report, pairs: bool = True) -> list[str]:
    """Return what the numbers say: orders, best values, distances to the paper. At smoke scale nothing."""
    if not report.comparable:
        return []
    lines = order_lines(report, pairs)
    for part in report.sections:
        if best := part.section.paper_best:
            title, head = part.section.title, part.section.head
            lines.append(f"{title}: best in the paper {head} = {best}, here {_best(part.results)}")
    if report.choices.scale == "paper":
        lines += _distances(report)
    if lines and len(report.choices.seeds) == 1:
        lines.append("one seed only: the part of chance is not known")
    return lines


def _distances(report: Report) -> list[str]:
    """Return the distance of the numbers to the printed ones."""
    lines = []
    final, best = apart(report.results), apart(report.results, best=True)
    if final is not None and best is not None:
        printed = [r for r in report.results if r.entry.printed is not None and not r.entry.suspect]
        some = sum(bool(known(r.values)) for r in printed)
        over = f", over {some} of {len(printed)} cells" if some < len(printed) else ""
        lines.append(
            f"mean absolute difference to the printed numbers{over}: {final:.2f}; with each run's best round, "
            f"which the authors' released code reports, {best:.2f}"
        )
    if report.exhibit.name == "table2" and (text := nearer_pool(report.sections)):
        lines.append(text)
    return lines


def footnotes(report: Report, results: Sequence[Result]) -> list[tuple[str, str]]:
    """Return marks and texts: printed numbers that contradict the paper, and runs that are not as asked."""
    doubts = dict.fromkeys(_doubt(result) for result in results if result.entry.suspect)
    notes = dict.fromkeys(note for result in results for note in result.notes)
    return [*((report.doubts[doubt], doubt) for doubt in doubts), *(("†", note) for note in notes)]


def missing_line(report: Report) -> str:
    """Return the runs without a result; empty if there are none."""
    missing = report.missing
    if not missing:
        return ""
    total = len({run.path for run in report.plan.values()})
    first = ", ".join(run.label for run in missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"without a result yet: {len(missing)} of {total} runs ({first}{more})"
