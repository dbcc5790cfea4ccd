"""A table or figure of the paper as it was measured, in words: the text of its cells and of what stands below."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedcsd.experiments.running import Run
from fedcsd.experiments.summary import notable
from fedcsd.paper.exhibits import BETA_OPEN, TITLES, Exhibit, Part, Point
from fedcsd.paper.measured import (
    HIGHER_IS_BETTER,
    Measured,
    Result,
    apart,
    best_in,
    measure,
    nearer_pool,
    order_of,
)
from fedcsd.paper.plan import PlannedRun
from fedcsd.paper.scales import Choices
from fedcsd.results.comparison import in_words
from fedcsd.results.tables import NOTHING, Cell, Mark, Number, Table, known, spread
from fedcsd.results.tables import Part as CellPart

LETTERS = "abcdefghij"


@dataclass(frozen=True)
class Numbers:
    """What a picture shows that is in no cell, as a table."""

    name: str
    """in the name of its file"""
    title: str
    table: Table


@dataclass(frozen=True)
class Report:
    """What there is to tell of one table or figure: finished runs, measured cells, what is missing."""

    exhibit: Exhibit
    choices: Choices
    runs: Mapping[tuple[Point, int], PlannedRun]
    outcomes: Mapping[tuple[Point, int], Run]
    numbers: Sequence[Numbers] = ()

    @classmethod
    def of(cls, exhibit: Exhibit, choices: Choices, runs: Mapping[tuple[Point, int], PlannedRun]) -> "Report":
        ended = {key: outcome for key, run in runs.items() if (outcome := run.run())}
        return cls(exhibit, choices, runs, ended)

    @property
    def paths(self) -> dict[tuple[Point, int], Path]:
        """Return the paths of the runs that have ended."""
        return {key: self.runs[key].path for key in self.outcomes}

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(seed for _, seed in self.runs))

    @cached_property
    def parts(self) -> list[Measured]:
        return [
            Measured(part, tuple(measure(cell, self.seeds, self.outcomes) for cell in part.cells))
            for part in self.exhibit.parts
        ]

    @property
    def results(self) -> list[Result]:
        return [result for part in self.parts for result in part.results]

    @property
    def untold(self) -> bool:
        """Whether models are hardly trained, so that nothing is said of how their numbers compare."""
        return self.choices.scale == "smoke"

    @property
    def printed(self) -> bool:
        """Whether the paper has numbers for this."""
        return any(result.cell.printed is not None for result in self.results)

    @property
    def missing(self) -> list[PlannedRun]:
        return list({run.path: run for key, run in self.runs.items() if key not in self.outcomes}.values())

    @cached_property
    def doubts(self) -> dict[str, str]:
        """A letter for each reason not to trust a printed number."""
        reasons = dict.fromkeys(_reason(r) for r in self.results if r.cell.suspect)
        return dict(zip(reasons, LETTERS, strict=False))

    def letter(self, result: Result) -> str:
        return self.doubts.get(_reason(result), "") if result.cell.suspect else ""


def _reason(result: Result) -> str:
    cell = result.cell
    return f"{cell.row}, {cell.column}: {cell.suspect}"


def table(report: Report, measured: Measured) -> Table:
    """Return the table of one part."""
    part, best = measured.part, {}
    for column in part.columns:
        results = measured.column(column)
        compared = [r for r in results if r.cell.measure in HIGHER_IS_BETTER and not report.untold]
        best[column] = best_in(compared)
    lines: list[list[Cell]] = []
    for row in part.rows:
        cells: list[Cell] = [_row_title(row, measured, report)]
        for column in part.columns:
            result = measured.at(row, column)
            cells.append(cell(report, result, row in best[column]) if result else NOTHING)
        lines.append(cells)
    return Table([part.head, *part.columns], lines)


def _row_title(row: str, measured: Measured, report: Report) -> str:
    """A row's name, with what stands in for its data where the row is named after that."""
    data = next(r.cell.point.data for r in measured.results if r.cell.row == row)
    return _in_its_place(row, data, report)


def cell(report: Report, result: Result, best: bool = False) -> list[CellPart]:
    """Return measured, printed and the difference: `58.61 ± 0.40 (58.50, +0.11)`."""
    parts, printed = measured_cell(result, best), result.cell.printed
    if printed is None:
        return parts
    parts += [" (", Number(f"{printed:.2f}"), *map(Mark, report.letter(result))]
    if result.difference is not None and not report.untold:
        parts += [", ", Number(f"{result.difference:+.2f}")]
    return [*parts, ")"]


def measured_cell(result: Result, best: bool = False) -> list[CellPart]:
    values, ends = known(result.values), [end.round for end in result.ends if end]
    if not values:
        if not ends:
            return [NOTHING]
        rounds = f"round {ends[0]}" if len(set(ends)) == 1 else f"rounds {min(ends)} to {max(ends)}"
        return [f"diverged ({rounds})"]
    alone = {"megabytes": ".2f", "target_entropy": ".4f"}.get(result.cell.measure)
    shown = format(result.mean, alone) if alone else spread(values)
    of = len(result.seeds)
    text = f" ({len(ends)} of {of} diverged)" * bool(ends)
    text += f" ({len(values)} of {of} seeds)" * bool(result.missing)
    return [Number(shown, best), *[Mark("†")] * bool(result.notes), text]


def order_lines(report: Report, pairs: bool = True) -> list[str]:
    """For each column with printed numbers, whether the order of methods is the paper's; which pairs are
    not, unless there is no room for that."""
    lines = []
    for measured in report.parts:
        for column in measured.part.columns:
            results = measured.column(column)
            if text := order_text(results, pairs):
                printed = [r for r in results if r.cell.printed is not None]
                whole = [r.cell.row for r in printed if r.whole]
                of = f"of {_and(whole)}, which alone have every seed: " if len(whole) < len(printed) else ""
                text += f"; best here {_best(results)}, in the paper {_printed_best(results)}" * (
                    len(whole) > 2
                )
                lines.append(f"{title_of(measured.part, report)}, {column}: {of}{text}")
    return lines


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def order_text(results: Sequence[Result], pairs: bool = True) -> str:
    order = order_of(results)
    if sum(r.whole and r.cell.printed is not None for r in results) < 2:
        return ""
    if order.tau is None:
        return "order open, no two differ"
    if not order.differ:
        return (
            f"order holds in all {order.compared} pairs"
            if order.compared > 1
            else "order holds in the one pair"
        )
    tau = f"Kendall's τ {order.tau:+.2f}"
    text = f"order differs, {order.agree} of {order.compared} pairs are as in the paper ({tau})"
    if not pairs:
        return text
    clear = [pair for pair in order.differ if pair not in order.unclear]
    reversed_ = [*_reversed(clear)]
    if order.unclear:
        pairs_are = "1 pair that is" if len(order.unclear) == 1 else f"{len(order.unclear)} pairs that are"
        reversed_.append(f"{pairs_are} no further apart than the seeds spread")
    return f"{text}, the other way round {'; '.join(reversed_)}"


def _reversed(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Pairs of which the paper has the first above the second, by the one that is above here."""
    above: dict[str, list[str]] = {}
    for first, second in pairs:
        above.setdefault(second, []).append(first)
    return [f"{_short(winner)} above {', '.join(map(_short, others))}" for winner, others in above.items()]


def _short(row: str) -> str:
    """`M1` for `M1: similarity, mask`."""
    return row.partition(":")[0]


def _best(results: Sequence[Result]) -> str:
    best = [r.cell.row for r in results if r.cell.row in best_in(results)]
    return f"{len(best)} of them alike" if len(best) > 3 else " and ".join(best) or "open"


def _printed_best(results: Sequence[Result]) -> str:
    """Of those that were measured; by the lower of two statements, where the paper makes two."""
    lower = {
        r.cell.row: min(r.cell.printed, r.cell.implied or r.cell.printed)
        for r in results
        if r.whole and r.cell.printed is not None
    }
    return " and ".join(row for row, value in lower.items() if value == max(lower.values()))


def sweep_lines(report: Report) -> list[str]:
    """For each sweep: where the paper finds the best value, and where it is here."""
    lines = []
    for measured in report.parts:
        if measured.part.paper_best:
            here = _best(measured.results)
            lines.append(
                f"{measured.part.title}: best in the paper {measured.part.head} = {measured.part.paper_best}, here {here}"
            )
    return lines


def legend(report: Report) -> list[str]:
    """What a reader of the numbers must know, a line each."""
    seeds, points = report.seeds, report.exhibit.points
    over = f"seed {seeds[0]}" if seeds else "no seed"
    if len(seeds) > 1:
        over = f"mean ± standard deviation over seeds {', '.join(map(str, seeds))}"
    brackets = f"; in brackets: printed{', difference' * (not report.untold)}" if report.printed else ""
    lines = [f"final round, {over}{brackets}"]
    if report.exhibit.first_seed_only and len(report.choices.seeds) > 1:
        lines.append("a picture of one seed, the first that is asked for")
    lines.append(report.choices.text)
    used = {point.data for point in points}
    lines += [note for data, note in report.choices.notes.items() if data in used]
    skewed = any(point.beta is not None for point in points)
    return [*lines, *(remark for remark in report.exhibit.remarks if skewed or remark != BETA_OPEN)]


def settings_lines(report: Report) -> list[str]:
    """What all runs on a data set have in common."""
    lines = []
    for data, title in TITLES.items():
        config = next((dict(o.settings) for (p, _), o in report.outcomes.items() if p.data == data), None)
        if config is None:
            continue
        if isinstance(config["data"], Mapping):  # the pool is not common to all
            config["data"] = {key: value for key, value in config["data"].items() if key != "train_pool"}
        shown = {key: value for key, value in notable(config).items() if key not in ("beta", "track_drift")}
        lines.append(f"{title}: {in_words(shown)}")
    return lines


def findings(report: Report, pairs: bool = True) -> list[str]:
    """What the numbers say beside each other; nothing, where they are of models that were hardly trained."""
    if report.untold:
        return []
    lines = [*order_lines(report, pairs), *sweep_lines(report)]
    if report.choices.scale == "paper":
        lines += _distances(report)
    if lines and len(report.choices.seeds) == 1:
        lines.append("one seed only: how much of this is chance is not known")
    return lines


def _distances(report: Report) -> list[str]:
    """How far the numbers are from those that are printed."""
    lines = []
    final, best = apart(report.results), apart(report.results, best=True)
    if final is not None and best is not None:
        lines.append(
            f"mean absolute difference to the printed numbers{_over(report.results)}: {final:.2f}; with each "
            f"run's best round, which the authors' released code reports, {best:.2f}"
        )
    if report.exhibit.name == "table2" and (text := nearer_pool(report.parts)):
        lines.append(text)
    return lines


def _over(results: Sequence[Result]) -> str:
    """Of how many cells a distance to the paper is, where some have no number."""
    printed = [r for r in results if r.cell.printed is not None and not r.cell.suspect]
    some = [r for r in printed if known(r.values)]
    return (
        f", over {len(some)} of {len(printed)} cells that have one here" if len(some) < len(printed) else ""
    )


def remarks(report: Report, part: Measured | None = None) -> list[str]:
    """Footnotes, of one part or all: printed numbers that contradict the paper, runs that are not what they
    should be."""
    results = part.results if part else report.results
    doubted = dict.fromkeys(_reason(result) for result in results if result.cell.suspect)
    lines = [f"{report.doubts[reason]}: {reason}" for reason in doubted]
    notes = dict.fromkeys(note for result in results for note in result.notes)
    return lines + [f"†: {note}" for note in notes]


def missing_line(report: Report) -> str:
    """Which runs there are not yet; empty if all are there."""
    missing = report.missing
    if not missing:
        return ""
    total = len({run.path for run in report.runs.values()})
    first = ", ".join(run.label for run in missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"without a result yet, and left out: {len(missing)} of {total} runs ({first}{more})"


def title_of(part: Part, report: Report) -> str:
    """A part's title, with what stands in for its data."""
    return _in_its_place(part.title, part.cells[0].point.data, report)


def _in_its_place(text: str, data: str, report: Report) -> str:
    other = report.choices.stand_ins.get(data)
    return f"{text} ({other} in its place)" if other and TITLES[data] in text else text
