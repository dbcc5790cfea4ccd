"""Write the report page: one file that needs nothing from elsewhere."""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from fedcsd.errors import UserError, note, one_line, reason
from fedcsd.files import write_whole, writing
from fedcsd.results.report.collect import collect

SCRIPTS = ("charts.js", "page.js")
FILE = "report.html"


def page(content: Mapping[str, Any], *, live: bool = False) -> str:
    """Return the page for this content; only a live one may ask its server for more."""
    plotly, script = plotly_script(), "\n".join(_part(name) for name in SCRIPTS)
    policy = [
        "default-src 'none'",
        f"script-src {digest(plotly)} {digest(script)}",
        "style-src 'unsafe-inline'",  # the charts set sizes and colours of single elements
        "img-src data: blob:",
        "connect-src 'self'" if live else "connect-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return Template(_part("page.html")).substitute(
        csp="; ".join(policy),
        title=html.escape(f"{content['title']} – fedcsd"),
        css=_part("page.css"),
        data=safe_json(content),
        plotly=plotly,
        js=script,
    )


def safe_json(content: Any) -> str:
    """Return JSON that cannot end the script element it stands in, for any names in it."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for c in "<>&\u2028\u2029":
        text = text.replace(c, f"\\u{ord(c):04x}")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")  # half a surrogate is no text


def digest(script: str) -> str:
    """Return the name of a script in a content security policy."""
    return f"'sha256-{base64.b64encode(sha256(script.encode()).digest()).decode()}'"


@cache
def plotly_script() -> str:
    """Return plotly.js, as the Python package has it."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


@cache
def _part(name: str) -> str:
    return (files("fedcsd.results.report") / name).read_text(encoding="utf-8")


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Write the report of these runs as one file."""
    text = page(collect(paths))
    with writing(out, "choose another -o"):
        write_whole(out, text.encode())
    return out


def report_beside(folder: Path) -> Path | None:
    """Write the report of a run or comparison into its folder; training is over, so an error is only noted."""
    try:
        return write_report([folder], folder / FILE)
    except Exception as error:
        text = reason(error) if isinstance(error, UserError) else one_line(error)
        note(f"there is no report of {folder}: {text}")
        return None
