"""Declare the paper's tables and figures, and one of ours: runs, measures and printed numbers.

printed.json holds the paper's numbers. Nothing here imports torch: methods and options are text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

CIFAR, FEMNIST, OFFICE = "cifar100", "femnist", "office_caltech_10"
TITLES = {CIFAR: "CIFAR-100", FEMNIST: "FEMNIST", OFFICE: "Office-Caltech-10"}
PRINTED: dict[str, Any] = json.loads(
    resources.files("fedcsd.paper").joinpath("printed.json").read_text("utf-8")
)
SETUP = PRINTED["setup"]
DOMAINS = {"amazon": "Amazon", "caltech": "Caltech", "dslr": "DSLR", "webcam": "Webcam", "average": "average"}
POOLS = {62: "62 training images a client", 0.6: "60 % of the images"}
NAMES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "fedavgm": "FedAvgM",
    "moon": "MOON",
    "fedgkd": "FedGKD",
    "fedproto": "FedProto",
    "fedcsd": "FedCSD",
}
# The paper does not state β for its figures; the tables have these values too.
SWEPT_BETA, FEMNIST_BETA = 0.5, 0.05


@dataclass(frozen=True)
class Point:
    """A method and the federation that trains it: one run for each seed."""

    data: str
    method: str
    """as for `fedcsd run --method`"""
    beta: float | None = None
    pool: float | None = None
    """training images of each domain of Office-Caltech-10: a number, or a share below 1"""

    @property
    def facts(self) -> dict[str, str]:
        """Return the values that `--only` can choose by."""
        name, *parts = self.method.split(":")
        options = dict(part.split("=") for part in parts if "=" in part)
        preset = [part for part in parts if "=" not in part]
        known = {"beta": self.beta, "pool": self.pool}
        if self.method.startswith("fedcsd") and not preset:
            known["alpha"] = SETUP["fedcsd"]["alpha"]
        return {
            "method": ":".join([name, *preset]),
            "data": self.data,
            **{key: f"{value:g}" for key, value in known.items() if value is not None},
            **options,
        }

    def label(self, data: str) -> str:
        """Return a name for people: method, data, skew, and the options that are not the paper's usual ones."""
        usual = method_text(self.facts["method"], self.data).split(":")
        parts = [part for part in self.method.split(":") if "=" not in part or part not in usual]
        skew = f"β {self.beta:g}" if self.beta is not None else f"pool {self.pool:g}"
        return f"{':'.join(parts)} {data} {skew}"


@dataclass(frozen=True)
class Entry:
    """A number of a table has a row, a column, runs, a measure and mostly a printed number."""

    row: str
    column: str
    point: Point
    measure: str = "accuracy"
    printed: float | None = None
    implied: float | None = None
    """another number that the paper states for the same cell"""
    suspect: str = ""
    """reason not to trust the printed number"""


@dataclass(frozen=True)
class Section:
    """A section is one table of rows and columns."""

    title: str
    entries: tuple[Entry, ...]
    head: str = "method"
    x: tuple[str, ...] = ()
    """of a sweep: the values on the axis, one for each row"""
    paper_best: str = ""
    """of a sweep: the best value in the paper"""

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(entry.row for entry in self.entries))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(entry.column for entry in self.entries))


@dataclass(frozen=True)
class Exhibit:
    """A table or figure of the paper has one or more sections."""

    name: str
    title: str
    sections: tuple[Section, ...]
    figure: str = ""
    """function of figures.py that draws it; empty for a table"""
    first_seed_only: bool = False
    remarks: tuple[str, ...] = field(default=())

    @property
    def points(self) -> list[Point]:
        return list(dict.fromkeys(entry.point for section in self.sections for entry in section.entries))


def method_text(name: str, data: str) -> str:
    """Return a method with the paper's hyper-parameters for this data."""
    if name in SETUP["mu"]:
        return f"{name}:mu={SETUP['mu'][name]}"
    if name.partition(":")[0] != "fedcsd":
        return name
    own = SETUP["fedcsd"][data]
    return f"{name}:mu={own['mu']}:tau={own['tau']}"


def _entries(
    rows: Iterable[tuple[str, str, Sequence[float | None]]],
    columns: Sequence[tuple[str, dict[str, Any], str]],
    data: str,
    suspect: Sequence[dict[str, Any]] = (),
) -> tuple[Entry, ...]:
    """Return the entries of rows (title, method, printed numbers) and columns (title, federation, measure)."""
    doubts = {tuple(map(str, doubt["cell"])): doubt for doubt in suspect}
    found = []
    for row, method, printed in rows:
        for (column, where, measure), number in zip(columns, printed, strict=True):
            last = where.get("beta", measure)
            doubt = doubts.get((method, data, str(last))) or doubts.get((method, str(last))) or {}
            point = Point(data, method_text(method, data), **where)
            why, implied = doubt.get("why", ""), doubt.get("implied")
            found.append(Entry(row, column, point, measure, number, implied, why))
    return tuple(found)


def _betas(betas: Iterable[float]) -> list[tuple[str, dict[str, Any], str]]:
    return [(f"β = {beta:g}", {"beta": beta}, "accuracy") for beta in betas]


def table1() -> Exhibit:
    table = PRINTED["table1"]
    parts = []
    for data in (CIFAR, FEMNIST):
        rows = [(label, name, table[data][name]) for name, label in NAMES.items()]
        entries = _entries(rows, _betas(table[data]["betas"]), data, table["suspect"])
        parts.append(Section(TITLES[data], entries))
    return Exhibit("table1", "Label skew: eight methods on CIFAR-100 and FEMNIST", tuple(parts))


def table2() -> Exhibit:
    table, parts = PRINTED["table2"], []
    rows = [(label, name, table[name]) for name, label in NAMES.items()]
    for pool, title in POOLS.items():
        columns = [(DOMAINS[c], {"pool": pool}, c) for c in table["columns"]]
        entries = _entries(rows, columns, OFFICE, table["suspect"])
        parts.append(Section(f"{TITLES[OFFICE]}, {title}", entries))
    return Exhibit("table2", "Feature skew: eight methods on Office-Caltech-10", tuple(parts))


def table3() -> Exhibit:
    table = PRINTED["table3"]
    named = (
        ("FedAvg", "fedavg", "fedavg"),
        ("Base", "fedcsd:base", "base"),
        ("M1: similarity, mask", "fedcsd:m1", "m1"),
        ("M2: similarity, TMA", "fedcsd:m2", "m2"),
        ("M3: mask, TMA", "fedcsd:m3", "m3"),
        ("FedCSD: all three", "fedcsd", "fedcsd"),
    )
    rows = [(label, method, [table[key]]) for label, method, key in named]
    entries = _entries(rows, _betas([SWEPT_BETA]), CIFAR)
    return Exhibit("table3", "Ablation of FedCSD's parts on CIFAR-100", (Section(TITLES[CIFAR], entries),))


def table4() -> Exhibit:
    table = PRINTED["table4"]
    rows = [
        ("forcible mask", "fedcsd:forcible", table["forcible"]),
        ("adaptive mask", "fedcsd", table["adaptive"]),
    ]
    entries = _entries(rows, _betas(table["betas"]), CIFAR, PRINTED["table1"]["suspect"])
    return Exhibit(
        "table4", "Masks: forcible against adaptive on CIFAR-100", (Section(TITLES[CIFAR], entries),)
    )


def _sweep(symbol: str, option: str, best: str) -> Section:
    own, values = SETUP["fedcsd"][CIFAR], SETUP["sweeps"][option]
    entries = []
    for value in values:
        options = {"mu": own["mu"], "tau": own["tau"], option: value}
        if options.get("alpha") == SETUP["fedcsd"]["alpha"]:
            del options["alpha"]  # the same point as in the tables
        method = ":".join(["fedcsd", *(f"{key}={number}" for key, number in options.items())])
        column = f"β = {SWEPT_BETA:g}"
        entries.append(Entry(f"{symbol} = {value:g}", column, Point(CIFAR, method, SWEPT_BETA)))
    x = tuple(f"{value:g}" for value in values)
    return Section(f"{TITLES[CIFAR]}, {symbol}", tuple(entries), symbol, x, best)


def fig_mu_tau() -> Exhibit:
    parts = (_sweep("μ", "mu", "0.001"), _sweep("τ", "tau", "10"))
    return Exhibit("fig-mu-tau", "FedCSD's accuracy against μ and τ on CIFAR-100 (Fig. 3)", parts, "sweep")


def fig_alpha() -> Exhibit:
    return Exhibit(
        "fig-alpha",
        "FedCSD's accuracy against α on CIFAR-100 (Fig. 4)",
        (_sweep("α", "alpha", "0.9"),),
        "sweep",
    )


BETA_OPEN = "the paper does not state β for this figure"


def fig_mask() -> Exhibit:
    heads = {
        "wrong_filtered": "wrong labels filtered (%)",
        "right_lost": "right labels lost (%)",
        "mask_rate": "kept of all (%)",
        "teacher_accuracy": "teacher's accuracy (%)",
    }
    entries: list[Entry] = []
    for data, beta in ((CIFAR, SWEPT_BETA), (FEMNIST, FEMNIST_BETA)):
        columns = [(head, {"beta": beta}, name) for name, head in heads.items()]
        row = f"{TITLES[data]}, β = {beta:g}"
        entries += _entries([(row, "fedcsd", [None] * len(heads))], columns, data)
    part = Section("the mask in the final round, on the clients' training data", tuple(entries), "data")
    title = "What the mask filters, against rounds (Fig. 5)"
    return Exhibit("fig-mask", title, (part,), "mask", remarks=(BETA_OPEN,))


def _everywhere(methods: Mapping[str, str], head: str, measure: str) -> tuple[Section, ...]:
    """Return a table of accuracy and one more measure for each data set and skew of the figures."""
    where: tuple[tuple[str, dict[str, Any], str], ...] = (
        (CIFAR, {"beta": SWEPT_BETA}, f"β = {SWEPT_BETA:g}"),
        (FEMNIST, {"beta": FEMNIST_BETA}, f"β = {FEMNIST_BETA:g}"),
        (FEMNIST, {"beta": 0.01}, "β = 0.01"),
        (OFFICE, {"pool": 62}, "62 images a client"),
        (OFFICE, {"pool": 0.6}, "60 % of the images"),
    )
    parts = []
    for data, federation, skew in where:
        accuracy = ("mean of the domains (%)", "average") if data == OFFICE else ("accuracy (%)", "accuracy")
        columns = [(accuracy[0], federation, accuracy[1]), (head, federation, measure)]
        entries = _entries([(label, name, [None, None]) for label, name in methods.items()], columns, data)
        parts.append(Section(f"{TITLES[data]}, {skew}", entries))
    return tuple(parts)


def fig_comm() -> Exhibit:
    methods = {"FedAvg": "fedavg", "Base": "fedcsd:base", "FedCSD": "fedcsd"}
    title = "Accuracy against rounds and bytes: FedAvg, Base and FedCSD (Fig. 6)"
    parts = _everywhere(methods, "sent (MB)", "megabytes")
    return Exhibit("fig-comm", title, parts, "communication", remarks=(BETA_OPEN,))


def target() -> Exhibit:
    methods = {
        "FedAvg": "fedavg",
        "Base": "fedcsd:base",
        "FedCSD": "fedcsd",
        "uniform target": "fedcsd:uniform",
        "scaled similarity": "fedcsd:scaled",
    }
    title = "Does FedCSD's target matter? Against a uniform one and one that keeps its size"
    parts = tuple(
        replace(
            part, entries=tuple(c for c in part.entries if (c.row, c.measure) != ("FedAvg", "target_entropy"))
        )
        for part in _everywhere(methods, "entropy of the target (% of log C)", "target_entropy")
    )
    remark = "the paper has no such table; the rows below FedCSD are controls, see docs/methods/fedcsd.md"
    return Exhibit("target", title, parts, remarks=(remark,))


DRIFT_METHODS = {
    "fedavg": "FedAvg",
    "feature_distillation": "feature distillation",
    "logit_distillation": "logit distillation",
    "fedcsd": "FedCSD",
}


def fig1() -> Exhibit:
    cell = Entry("FedAvg", f"β = {SWEPT_BETA:g}", Point(CIFAR, "fedavg", SWEPT_BETA))
    part = Section(f"{TITLES[CIFAR]}, the well-trained global model", (cell,))
    title = "Drift in one long round from a well-trained model: logits, features, accuracy"
    return Exhibit("fig1", title, (part,), "drift", first_seed_only=True, remarks=(BETA_OPEN,))


def fig_tsne() -> Exhibit:
    columns = _betas([FEMNIST_BETA])
    entries = _entries([("FedAvg", "fedavg", [None]), ("FedCSD", "fedcsd", [None])], columns, FEMNIST)
    part = Section(f"{TITLES[FEMNIST]}, the models whose features are shown", entries)
    title = "t-SNE of latent features on FEMNIST (Fig. 7)"
    return Exhibit("fig-tsne", title, (part,), "tsne", first_seed_only=True, remarks=(BETA_OPEN,))


_ALL = (table1, table2, table3, table4, fig1, fig_mu_tau, fig_alpha, fig_mask, fig_comm, fig_tsne, target)
EXHIBITS: dict[str, Exhibit] = {exhibit.name: exhibit for exhibit in (make() for make in _ALL)}
