"""Runs the documentation's notebook and keeps what it gave: python tools/notebook.py"""

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

PATH = Path(__file__).parents[1] / "docs" / "notebook.ipynb"


def executed(path: Path = PATH) -> Any:
    """Run the notebook from the first cell to the last and return it with its outputs; raise if a cell fails."""
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
    return notebook


if __name__ == "__main__":
    nbformat.write(executed(), PATH)  # type: ignore[no-untyped-call]
    print(f"written: {PATH}")
