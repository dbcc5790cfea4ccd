"""Decode image files into one uint8 tensor, on all cores, with progress."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedcsd.errors import UserError

CHUNK = 256
GREY = ("1", "L", "LA")


class _Colour(Exception):
    """Report that an image has colour while images are decoded as grey."""


def decode(
    read: Callable[[int], bytes],
    count: int,
    place: Callable[[int], str],
    *,
    size: int = 0,
    title: str = "",
    grey: bool = True,
) -> Tensor:
    """Decode images 0 to `count` − 1 into [N, C, H, W]: grey if all of them are grey, else colour.

    Args:
        read: returns the bytes of an image
        count: number of images
        place: returns the place of an image, for errors
        size: scales all images to size × size; without it they must be of one size
        title: name of the data, for the progress bar
        grey: allows a grey result
    """
    if size < 0:
        raise UserError(f"data.size must be at least 0, not {size}")
    first = _open(read, 0, place, "", 0)
    mode = "L" if grey and first.mode in GREY else "RGB"
    height, width = (size, size) if size else (first.height, first.width)
    shape = (height, width) if mode == "L" else (height, width, 3)
    _check_memory(count, shape)
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

    try:
        _all(some, count, title)
    except _Colour:  # a later image has colour, so all are read again as colour
        return decode(read, count, place, size=size, title=title, grey=False)
    tensor = torch.from_numpy(pixels)
    return tensor[:, None] if mode == "L" else tensor.permute(0, 3, 1, 2).contiguous()


def _check_memory(count: int, shape: tuple[int, ...]) -> None:
    needed, there = count * prod(shape), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise UserError(
            f"{count:,} images of {shape[1]}×{shape[0]} take {needed / 1e9:,.0f} GB of memory, and this machine has "
            f"{there / 1e9:,.0f}: choose a smaller size with --set data.size=64, for example"
        )


def _all(some: Callable[[int], int], count: int, title: str) -> None:
    with progress(f"decoding {title}", count) as advance, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for done in pool.map(some, range(0, count, CHUNK)):
            advance(done)


def _open(
    read: Callable[[int], bytes], i: int, place: Callable[[int], str], mode: str, size: int
) -> Image.Image:
    try:
        image: Image.Image = Image.open(BytesIO(read(i)))
        image.load()
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).splitlines()[0].split("<")[0].strip()
        raise UserError(f"{place(i)} cannot be read as an image ({reason}): replace or remove it") from None
    if image.mode.startswith(("I", "F")):
        raise UserError(
            f"{place(i)} has more than 8 bits a pixel (mode {image.mode}): convert the images to 8 bits, "
            "or give their values as floating-point numbers in an .npz file"
        )
    if mode == "L" and image.mode not in GREY:
        raise _Colour
    if mode:
        image = image.convert(mode)
    return image.resize((size, size), Image.Resampling.BILINEAR) if size else image


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], Any]]:
    """Show a bar with the time left on a terminal, or one line elsewhere, on standard error."""
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
