"""Write small files of the kinds that users have."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet as pq


def pictures(count: int, shape: tuple[int, ...] = (28, 28), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def png(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, kind, lossless=True)
    return buffer.getvalue()


def write_parquet(path: Path, pixels: np.ndarray, columns: dict[str, Any], image: str = "image") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": png(p), "path": f"{i}.png"} for i, p in enumerate(pixels)]
    pq.write_table(pa.table({image: rows, **columns}), path)


def nothing_half_written(folder: Path) -> None:
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    assert not list(folder.glob("*.safetensors"))
