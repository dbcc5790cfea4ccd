"""Test the package's digest: it changes only where a result can change."""

import shutil
from pathlib import Path

from fedcsd.experiments.runs import provenance


def test_the_digest_covers_every_file_that_can_change_a_result(tmp_path: Path) -> None:
    package = Path(provenance.__file__).parents[2]
    copy = tmp_path / "copy"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))

    def digest() -> str:
        provenance.package.cache_clear()
        return provenance.package(copy)

    whole = digest()
    assert whole == provenance.package()  # wherever it lies
    assert {(package / name).is_dir() for name in provenance.OUTSIDE} == {True}
    files = [file for end in provenance.SOURCES for file in copy.rglob(f"*{end}")]
    rooms = {file.relative_to(copy).parts[0]: file for file in sorted(files)}
    assert {"messages.py", "experiments", "deploy", "federation", "kernels"} <= rooms.keys()
    for room, file in rooms.items():  # a byte of a file of each room
        content = file.read_bytes()
        file.write_bytes(content + b"\n")
        assert (digest() == whole) == (room in provenance.OUTSIDE), room
        file.write_bytes(content)
    for name in ("csd.c", "csd.cu", "shape.h"):
        content = (copy / "kernels" / name).read_bytes()
        (copy / "kernels" / name).write_bytes(content + b" ")
        assert digest() != whole
        (copy / "kernels" / name).write_bytes(content)
    (copy / "seeds.py").rename(copy / "data/seeds.py")
    assert digest() != whole
