"""Image files to one uint8 tensor, on all cores, with progress."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedcsd.errors import UserError

CHUNK = 256


def decode(
    read: Callable[[int], bytes], count: int, place: Callable[[int], str], *, size: int = 0, title: str = ""
) -> Tensor:
    """Images 0 to `count` − 1 as [N, C, H, W]; `read(i)` gives the bytes of one, `place(i)` says where it is from.

    The first image decides between grey and colour. `size` scales all to size × size; without it they
    must be of one size.
    """
    first = _open(read, 0, place, "", size)
    mode = "L" if first.mode in ("1", "L", "LA", "I;16") else "RGB"
    shape = (first.height, first.width) if mode == "L" else (first.height, first.width, 3)
    pixels = np.empty((count, *shape), dtype=np.uint8)

    def some(start: int) -> int:
        stop = min(start + CHUNK, count)
        for i in range(start, stop):
            image = _open(read, i, place, mode, size)
            if (image.height, image.width) != shape[:2]:
                raise UserError(
                    f"{place(i)} is {image.width}×{image.height} and {place(0)} {shape[1]}×{shape[0]}: "
                    "scale all to one size with --set data.size=64, for example"
                )
            pixels[i] = np.asarray(image)
        return stop - start

    with progress(f"decoding {title}", count) as advance, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for done in pool.map(some, range(0, count, CHUNK)):
            advance(done)
    tensor = torch.from_numpy(pixels)
    return tensor[:, None] if mode == "L" else tensor.permute(0, 3, 1, 2).contiguous()


def _open(
    read: Callable[[int], bytes], i: int, place: Callable[[int], str], mode: str, size: int
) -> Image.Image:
    try:
        image: Image.Image = Image.open(BytesIO(read(i)))
        image.load()
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).splitlines()[0].split("<")[0].strip()
        raise UserError(f"{place(i)} cannot be read as an image ({reason}): replace or remove it") from None
    if mode:
        image = image.convert(mode)
    return image.resize((size, size), Image.Resampling.BILINEAR) if size else image


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], Any]]:
    """A bar with the time left on a terminal, one line elsewhere; on standard error, gone when it is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        if total > 5000:
            console.print(f"{title}: {total:,} images", soft_wrap=True)
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)
