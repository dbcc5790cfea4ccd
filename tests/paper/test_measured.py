"""Compare the arithmetic of the paper's tables with numbers worked out by hand."""

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcsd.errors import Divergence
from fedcsd.experiments.running import Run
from fedcsd.experiments.runs.recorded import Change
from fedcsd.paper.exhibits import EXHIBITS, NAMES, PRINTED, Entry, Exhibit, Point, Section
from fedcsd.paper.measured import (
    Result,
    SectionResults,
    apart,
    best_in,
    curve,
    measure,
    nearer_pool,
    order_of,
)
from fedcsd.paper.report import (
    Report,
    cell,
    findings,
    measured,
    missing_line,
    order_lines,
    order_text,
    table,
)
from fedcsd.paper.scales import Choices
from fedcsd.results.tables import latex, markdown, plain

NAN = math.nan
POINT = Point("cifar100", "fedavg", 0.5)


def record(accuracy: float, **more: Any) -> dict[str, Any]:
    return {
        "test_accuracy": accuracy,
        "test_loss": 1.0,
        "bytes_up": 3_000_000,
        "bytes_down": 1_000_000,
        **more,
    }


def outcome(*accuracies: float, diverged: int = 0, **more: Any) -> Run:
    end = Divergence(diverged, "no longer finite") if diverged else None
    return Run({}, [record(a, **more) for a in accuracies], {}, {}, None, end)


def result(
    row: str, values: list[float], printed: float | None = None, implied: float | None = None
) -> Result:
    cell = Entry(row, "β = 0.5", POINT, "accuracy", printed, implied, "why" if implied else "")
    seeds, none = tuple(range(len(values))), (None,) * len(values)
    return Result(cell, seeds, tuple(values), tuple(values), none, ())


def test_a_cell_over_seeds() -> None:
    cell = Entry("FedAvg", "β = 0.5", POINT, "accuracy", 66.67)
    runs = {(POINT, 0): outcome(0.1, 0.60), (POINT, 1): outcome(0.7, 0.64), (POINT, 2): outcome(0.3, 0.68)}
    measured = measure(cell, (0, 1, 2), runs)
    assert measured.values == pytest.approx((60, 64, 68))
    assert measured.best == pytest.approx((60, 70, 68))
    assert measured.mean == pytest.approx(64)
    assert measured.spread == pytest.approx(4)  # √((16 + 0 + 16) / 2)
    assert measured.difference == pytest.approx(-2.67)
    assert measured.whole


def test_what_is_missing_diverged_or_blown_up_is_not_whole() -> None:
    cell = Entry("FedAvg", "β = 0.5", POINT)
    assert measure(cell, (0, 1), {(POINT, 0): outcome(0.5)}).missing == (1,)
    gone = measure(cell, (0, 1), {(POINT, 0): outcome(0.5), (POINT, 1): outcome(0.4, diverged=7)})
    assert gone.values[0] == pytest.approx(50)
    assert math.isnan(gone.values[1])
    assert not gone.whole
    assert gone.spread is None
    blown = measure(cell, (0,), {(POINT, 0): outcome(0.5, test_loss=1e9)})
    assert blown.values == pytest.approx((50,))
    assert not blown.whole
    mended = replace(outcome(0.5), changes=(Change(3, "setting", "lr", 0.1, 0.01),))
    changed = measure(cell, (0,), {(POINT, 0): mended})
    assert changed.notes == ("fedavg cifar100 β 0.5 seed 0: after round 3: lr 0.1 -> 0.01",)
    assert not changed.whole
    assert best_in([changed, measure(cell, (0,), {(POINT, 0): outcome(0.4)})]) == set()


def test_other_measures() -> None:
    history = [record(0.5, domain_accuracy={"dslr": 0.25}, domain_mean=0.3, wrong_filtered=0.9), record(0.6)]
    assert curve("megabytes", history) == [4, 8]
    assert curve("dslr", history)[0] == 25
    assert math.isnan(curve("dslr", history)[1])
    assert curve("average", history) == pytest.approx([30, 60])  # without domains the test accuracy
    assert curve("wrong_filtered", history)[0] == 90


def test_a_final_round_without_a_value_has_none() -> None:
    # A teacher that was right throughout has no wrong soft label to filter.
    cell = Entry("digits", "wrong, filtered", POINT, "wrong_filtered")
    run = replace(outcome(), history=[record(0.5, wrong_filtered=0.9), record(0.6)])
    found = measure(cell, (0,), {(POINT, 0): run})
    assert math.isnan(found.values[0])
    assert found.best == pytest.approx((90,))
    assert measured(found) == ["–"]


def test_the_order_of_four_methods_by_hand() -> None:
    # Printed a > b > c > d; measured b > a > c, d equal to c. Pairs: ab differs; ac, ad, bc, bd agree; cd is tied.
    results = [
        result("a", [70, 72], 74),
        result("b", [71, 73], 73),
        result("c", [60, 60], 72),
        result("d", [60, 60], 71),
    ]
    order = order_of(results)
    assert (order.agree, order.differ, order.compared) == (4, (("a", "b"),), 5)
    assert order.tau == pytest.approx((4 - 1) / 5)
    # 71 against 72, spread √2 each: their difference of 1 is within √(2 + 2) = 2.
    assert order.unclear == (("a", "b"),)
    assert best_in(results) == {"b"}
    text = "order differs, 4 of 5 pairs are as in the paper (Kendall's τ +0.60), reversed: "
    assert order_text(results) == text + "1 pair within the spread of the seeds"
    clear = [*results[1:], result("a", [66, 68], 74), result("e", [50, 50], 70), result("f", [80, 80], 50)]
    assert "reversed: b above a; f above b, c, d, a, e" in order_text(clear)


def test_pairs_whose_printed_order_is_not_sure_are_left_out() -> None:
    # 98.49 may be 67.10: above or below b, but in both cases above c.
    results = [result("a", [50], 98.49, 67.10), result("b", [60], 70), result("c", [40], 60)]
    order = order_of(results)
    assert (order.agree, order.differ) == (2, ())
    assert order.tau == 1


@given(st.lists(st.integers(0, 400), min_size=2, max_size=7), st.data())
def test_order_is_kendalls_tau_where_nothing_is_tied(measured: list[int], data: st.DataObject) -> None:
    printed = data.draw(st.permutations(range(len(measured))))
    results = [
        result(str(i), [m / 4], 50 + p) for i, (m, p) in enumerate(zip(measured, printed, strict=True))
    ]
    signs = [
        (measured[i] > measured[j]) - (measured[i] < measured[j])
        == (printed[i] > printed[j]) - (printed[i] < printed[j])
        for i, j in combinations(range(len(measured)), 2)
        if measured[i] != measured[j]
    ]
    order = order_of(results)
    assert order.compared == len(signs)
    if signs:
        assert order.tau == pytest.approx((2 * sum(signs) - len(signs)) / len(signs))


def test_distance_leaves_out_suspect_numbers() -> None:
    results = [result("a", [70], 72), result("b", [60], 98.49, 67.1), result("c", [50, 52], 50)]
    assert apart(results) == pytest.approx((2 + 1) / 2)
    assert apart([result("b", [NAN], 70)]) is None


def test_the_nearer_pool() -> None:
    def part(title: str, values: list[float]) -> SectionResults:
        cells = [
            Entry(row, "average", Point("office_caltech_10", "fedavg", pool=62), "average", printed)
            for row, printed in (("a", 60.0), ("b", 62.0))
        ]
        results = [Result(c, (0,), (v,), (v,), (None,), ()) for c, v in zip(cells, values, strict=True)]
        return SectionResults(Section(title, tuple(cells)), tuple(results))

    text = nearer_pool([part("Office, 62 images", [61, 65]), part("Office, 60 %", [78, 80])])
    assert text == "nearer to the paper: 62 images (mean absolute difference, 62 images: 2.00, 60 %: 18.00)"
    # b is missing in one pool: only a counts.
    text = nearer_pool([part("Office, 62 images", [61, NAN]), part("Office, 60 %", [60, 99])])
    assert "nearer to the paper: 60 %" in text
    assert "62 images: 1.00, 60 %: 0.00" in text


def test_the_text_of_a_cell() -> None:
    why = "no other method passes 72; the printed rise of 0.43 over FedAvg would make it 67.10"
    cells = tuple(
        Entry(row, "β = 0.5", Point("cifar100", row, 0.5), "accuracy", printed, implied, reason)
        for row, printed, implied, reason in (
            ("fedavg", 66.67, None, ""),
            ("moon", 98.49, 67.10, why),
            ("fedprox", 68.64, None, ""),
            ("fednova", 68.34, None, ""),
        )
    )
    exhibit = Exhibit("table1", "title", (Section("CIFAR-100", cells),))
    runs = {
        (cells[0].point, 0): outcome(0.66),
        (cells[0].point, 1): outcome(0.68),
        (cells[1].point, 0): outcome(0.60),
        (cells[1].point, 1): outcome(0.5, diverged=4),
        (cells[2].point, 0): outcome(0.5, diverged=3),
        (cells[2].point, 1): outcome(0.5, diverged=9),
    }
    planned = {(cell.point, seed): None for cell in cells for seed in (0, 1)}
    report = Report(exhibit, Choices("paper", (0, 1)), planned, runs)  # type: ignore[arg-type]
    texts = ["".join(map(plain, cell(report, r))) for r in report.results]
    assert texts == [
        "67.00 ± 1.41 (66.67, +0.33)",
        "60.00 (1 of 2 diverged) (98.49ᵃ, -38.49)",
        "diverged (rounds 3 to 9) (68.64)",
        "– (68.34)",
    ]
    best = cell(report, report.results[0], best=True)
    assert "".join(map(markdown, best)) == "**67.00 ± 1.41** (66.67, +0.33)"
    assert "($98.49$$^a$, $-38.49$)" in "".join(map(latex, cell(report, report.results[1])))
    assert report.doubts == {f"moon, β = 0.5: {why}": "a"}


def test_a_table_that_repeats_the_paper_holds_in_every_order() -> None:
    """With measured numbers as printed, every order holds and no cell differs."""
    for name in ("table1", "table2", "table3", "table4"):
        exhibit = EXHIBITS[name]
        parts = []
        for part in exhibit.sections:
            results = [
                Result(c, (0,), (c.printed or NAN,), (c.printed or NAN,), (None,), ()) for c in part.entries
            ]
            parts.append(SectionResults(part, tuple(results)))
            for column in part.columns:
                assert not order_of(parts[-1].column(column)).differ
        report = Report(exhibit, Choices("paper", (0,)), {}, {})
        report.__dict__["sections"] = parts
        assert all("order holds" in line for line in order_lines(report))
        assert len(order_lines(report)) == sum(len(part.columns) for part in exhibit.sections)
        assert (
            "mean absolute difference to the printed numbers: 0.00"
            in findings(report)[len(order_lines(report))]
        )
        assert findings(report)[-1] == "one seed only: the part of chance is not known"
        small = Report(exhibit, Choices("small", (0,)), {}, {})
        small.__dict__["sections"] = parts
        assert findings(small) == [*order_lines(report), findings(report)[-1]]  # no distance to the paper
        hardly = Report(exhibit, Choices("smoke", (0,)), {}, {})
        hardly.__dict__["sections"] = parts
        assert findings(hardly) == []


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        ([60, 61, 62, 63], "order holds in all 6 pairs; best here d, in the paper d"),
        ([60, 61, 62, NAN], "among a, b and c, which have every seed: order holds in all 3 pairs; best here c, in the paper c"),
        ([60, 61, NAN, NAN], "among a and b, which have every seed: order holds in the one pair"),
        ([61, 60, NAN, NAN], "among a and b, which have every seed: order differs, 0 of 1 pairs are as in the paper "
         "(Kendall's τ -1.00)"),
    ],
)  # fmt: skip
def test_an_order_says_of_whom_it_is(measured: list[float], told: str) -> None:
    results = [
        result(row, [value], 50 + index)
        for index, (row, value) in enumerate(zip("abcd", measured, strict=True))
    ]
    part = Section("FEMNIST", tuple(r.entry for r in results))
    report = Report(Exhibit("t", "title", (part,)), Choices("paper", (0,)), {}, {})
    report.__dict__["sections"] = [SectionResults(part, tuple(results))]
    (line,) = order_lines(report, pairs=False)
    assert line == f"FEMNIST, {results[0].entry.column}: {told}"


def test_rows_named_after_data_say_what_stands_in() -> None:
    exhibit, choices = EXHIBITS["fig-mask"], Choices("paper", (0,), {}, {"femnist": "mnist"})
    planned = {(point, 0): None for point in exhibit.points}
    report = Report(exhibit, choices, planned, {})  # type: ignore[arg-type]
    assert [row[0] for row in table(report, report.sections[0]).texts] == [
        "CIFAR-100, β = 0.5",
        "FEMNIST, β = 0.05 (mnist in its place)",
    ]


def test_without_runs_nothing_is_said() -> None:
    report = Report(EXHIBITS["table3"], Choices("paper", (0,)), {}, {})
    assert order_lines(report) == []
    assert missing_line(report) == ""


def test_declared_tables_have_every_printed_number() -> None:
    """The paper's tables read row by row from printed.json are the cells, in order."""
    for part, data in zip(EXHIBITS["table1"].sections, ("cifar100", "femnist"), strict=True):
        table = PRINTED["table1"][data]
        assert [c.printed for c in part.entries] == [number for name in NAMES for number in table[name]]
        assert [c.point.beta for c in part.entries[:3]] == table["betas"]
    assert {c.point.pool for p in EXHIBITS["table2"].sections for c in p.entries} == {62, 0.6}
    suspect = [
        (c.row, c.column, c.implied) for p in EXHIBITS["table1"].sections for c in p.entries if c.suspect
    ]
    assert sorted(suspect) == [
        ("FedCSD", "β = 5", 73.69),
        ("FedProto", "β = 0.05", 69.70),
        ("MOON", "β = 0.01", 56.78),
        ("MOON", "β = 0.5", 67.10),
    ]
