"""Data: where the bytes come from (sources), what training sees (dataset), who holds what (partition)."""

from fedcsd.data.dataset import Dataset, load, sources
from fedcsd.data.partition import partitions, split

__all__ = ["Dataset", "load", "partitions", "sources", "split"]
