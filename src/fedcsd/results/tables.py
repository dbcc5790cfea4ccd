"""Render a table as text, Markdown, LaTeX and CSV."""

import csv
import io
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

NOTHING = "–"
SPACES = re.compile(r"\s+")
RAISED = str.maketrans("abcdefghij", "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲ")
FITTING = 100  # letters of LaTeX in a row for which a page is wide enough
LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "–": "--",
}


@dataclass(frozen=True)
class Number:
    """A number in a cell stands in math mode in LaTeX, and in bold if it is the best."""

    text: str
    """such as `96.85 ± 1.12`"""
    best: bool = False


@dataclass(frozen=True)
class Mark:
    """A mark refers to a note below the table: `†`, or the letter of a footnote."""

    letter: str


Part = str | Number | Mark
Cell = str | Sequence[Part]


def parts(cell: Cell) -> Sequence[Part]:
    return [cell] if isinstance(cell, str) else cell


def unbroken(text: str) -> str:
    return " ".join(text.split())


def plain(part: Part) -> str:
    """Return a part of a cell as text for a terminal."""
    if isinstance(part, Mark):
        return " †" if part.letter == "†" else part.letter.translate(RAISED)
    return part.text if isinstance(part, Number) else part


def markdown(part: Part) -> str:
    """Return a part of a cell as Markdown."""
    if isinstance(part, str):
        return SPACES.sub(" ", part).replace("|", "\\|")
    return f"**{part.text}**" if isinstance(part, Number) and part.best else plain(part)


def latex(part: Part) -> str:
    """Return a part of a cell as LaTeX, for a document without any package for it."""
    if isinstance(part, Mark):
        return r"\,$^\dagger$" if part.letter == "†" else f"$^{part.letter}$"
    if isinstance(part, Number):
        number = part.text.replace("±", r"\pm")
        return f"$\\mathbf{{{number}}}$" if part.best else f"${number}$"
    text = re.sub("-(?=-)", "-\0", SPACES.sub(" ", part).replace("µ", "μ"))
    return "".join(map(_letter, text)).replace("\0", "{}")  # two hyphens would become one dash


def _letter(c: str) -> str:
    name = unicodedata.name(c, "")
    if name.startswith("GREEK SMALL LETTER ") and name.count(" ") == 3:
        letter = name.split()[-1].lower()
        return {"omicron": "o", "lamda": r"$\lambda$"}.get(letter, f"$\\{letter}$")
    return LATEX.get(c, c)


@dataclass(frozen=True)
class Table:
    """A table has a head and rows of cells; the first column is text, the others are numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> "Table":
        """Return the table of mappings with the same keys."""
        return cls(list(lines[0]), [[str(value) for value in line.values()] for line in lines])

    @property
    def texts(self) -> list[list[str]]:
        """Return the cells as plain text."""
        return [["".join(map(plain, parts(cell))) for cell in row] for row in self.rows]

    @property
    def best(self) -> list[list[bool]]:
        """Tell which cells have a number that is marked as the best."""
        return [[any(isinstance(p, Number) and p.best for p in parts(c)) for c in row] for row in self.rows]

    def column(self, name: str) -> list[str]:
        """Return the texts of the column with this heading."""
        place = self.head.index(name)
        return [row[place] for row in self.texts]

    def csv(self) -> str:
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows([map(unbroken, self.head), *self.texts])
        return buffer.getvalue()

    def markdown(self) -> list[str]:
        """Return the lines of a Markdown table."""
        rows = [["".join(map(markdown, parts(cell))) for cell in row] for row in (self.head, *self.rows)]
        rules = ["---", *["---:"] * (len(self.head) - 1)]
        return ["| " + " | ".join(row) + " |" for row in (rows[0], rules, *rows[1:])]

    def latex(self, title: str = "", notes: Sequence[Cell] = ()) -> list[str]:
        """Return the lines of a tabular, with a title and notes across it; one that is too wide is scaled."""
        head, *rows = [["".join(map(latex, parts(cell))) for cell in row] for row in (self.head, *self.rows)]
        end = r"\end{tabular}"
        lines = [
            f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
            r"\toprule",
            *([self._across(latex(title)), r"\midrule"] if title else []),
            " & ".join(head) + r" \\",
            r"\midrule",
            *(" & ".join(row) + r" \\" for row in rows),
            r"\bottomrule",
            *(self._across(r"\footnotesize " + "".join(map(latex, parts(note)))) for note in notes),
        ]
        if title and sum(max(map(len, column)) for column in zip(head, *rows, strict=True)) > FITTING:
            return [r"\resizebox{\linewidth}{!}{%", *lines, f"{end}}}"]
        return [*lines, end]

    def _across(self, text: str) -> str:
        return rf"\multicolumn{{{len(self.head)}}}{{l}}{{{text}}} \\"


def known(values: Sequence[float]) -> list[float]:
    """Return the values that are finite."""
    return [value for value in values if math.isfinite(value)]


def spread(values: Sequence[float], sign: str = "", digits: int = 2) -> str:
    """Return mean ± standard deviation over seeds; one seed has no deviation."""
    text = f"{mean(values):{sign}.{digits}f}"
    return f"{text} ± {stdev(values):.{digits}f}" if len(values) > 1 else text
