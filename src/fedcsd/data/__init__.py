"""Load data sets (sources), hold and augment them (dataset, augment), and partition them among clients.

Models and training do not belong here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcsd.data.dataset import Dataset, Groups, from_python
from fedcsd.data.partition import partitions, split
from fedcsd.data.sources import SOURCES, load_source, source

__all__ = ["SOURCES", "Dataset", "Groups", "load", "partitions", "source", "split"]


def load(data: Any, options: Mapping[str, Any] | None = None, folder: Path | None = None) -> Dataset:
    """Return a data set from a name, a path or objects of a notebook. `folder` holds named data sets."""
    if isinstance(data, (str, Path)):
        return load_source(str(data), options or {}, folder)
    return from_python(data)
