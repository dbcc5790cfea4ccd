"""Test that the kernels are compiled once and whole, and that every failure leaves a working program."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedcsd.kernels.build import library

pytestmark = [pytest.mark.slow, pytest.mark.skipif(library() is None, reason="needs a C compiler")]

PROGRAM = """
import torch
from fedcsd.errors import show_notes
show_notes()
from fedcsd.kernels import convolution
from fedcsd.kernels.build import library
from fedcsd.models.simple_cnn import simple_cnn
x, w = torch.randn(3, 1, 9, 9), torch.randn(2, 1, 3, 3)
for _ in range(2):
    assert torch.allclose(convolution(x, w), torch.nn.functional.conv2d(x, w), atol=1e-5)
    simple_cnn((1, 28, 28), 10)(torch.randn(2, 1, 28, 28))
print("compiled" if library() else "plain")
"""


def start(cache: Path, program: str = PROGRAM, **environment: str) -> "subprocess.Popen[str]":
    plain = {key: value for key, value in os.environ.items() if key not in ("CC", "FEDCSD_KERNELS")}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**plain, "FEDCSD_CACHE": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[str, list[str]]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip(), [line for line in err.splitlines() if "note:" in line]


def test_two_processes_build_at_once_and_a_third_finds_it(tmp_path: Path) -> None:
    both = [start(tmp_path) for _ in range(2)]
    assert [ended(process) for process in both] == [("compiled", [])] * 2
    (built,) = tmp_path.iterdir()
    before = built.stat()
    assert ended(start(tmp_path)) == ("compiled", [])
    assert built.stat() == before or built.stat().st_mtime_ns == before.st_mtime_ns


def test_a_torn_library_is_made_anew(tmp_path: Path) -> None:
    ended(start(tmp_path))
    (built,) = tmp_path.iterdir()
    whole = built.read_bytes()
    built.write_bytes(b"")
    assert ended(start(tmp_path)) == ("compiled", [])
    assert len(built.read_bytes()) == len(whole)


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert ended(start(file / "folder")) == ("compiled", [])


@pytest.mark.parametrize("missing", ["compiler", "path", "works", "words"])
def test_without_a_compiler_pytorch_does_it_and_one_line_says_so(tmp_path: Path, missing: str) -> None:
    environment = {
        "compiler": {"CC": "no-such-compiler"},
        "path": {"PATH": ""},
        "works": {"CC": "/bin/false"},
        "words": {"CC": "'"},
    }[missing]
    out, notes = ended(start(tmp_path, **environment))
    assert out == "plain"
    (line,) = notes
    assert "install gcc" in line
    assert missing != "compiler" or "there is no C compiler no-such-compiler" in line


def test_a_compiler_that_does_not_know_the_processor(tmp_path: Path) -> None:
    """It is tried without -march=native; where that leaves neither AVX nor NEON, PyTorch is faster."""
    script = tmp_path / "cc"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *march*) exit 1;; esac\nexec {shutil.which("cc")} -mavx2 -mfma "$@"\n'
    )
    script.chmod(0o755)
    known = "avx2" in Path("/proc/cpuinfo").read_text()
    out, notes = ended(start(tmp_path / "cache", CC=str(script)))
    assert (out, len(notes)) == (("compiled", 0) if known else ("plain", 1))


def test_switched_off_it_is_off_without_a_word(tmp_path: Path) -> None:
    assert ended(start(tmp_path, FEDCSD_KERNELS="off", CC="/bin/false")) == ("plain", [])
    assert list(tmp_path.iterdir()) == []


def test_a_switch_that_is_neither(tmp_path: Path) -> None:
    process = start(tmp_path, FEDCSD_KERNELS="maybe")
    _, err = process.communicate(timeout=120)
    assert "FEDCSD_KERNELS is 'maybe': set it to on or off" in err


def test_forked_workers_have_it_from_the_start(tmp_path: Path) -> None:
    """Workers do not compile: neither the cache folder nor the compiler is there any more."""
    program = """
import os, shutil, torch
from fedcsd.kernels import convolution, build
from fedcsd.models.layers import ConvPool
layer = ConvPool(1, 2, 3)
shutil.rmtree(os.environ["FEDCSD_CACHE"]); os.environ["CC"] = "/bin/false"; build._find_or_build = None
x = torch.randn(20, 1, 9, 9)
expected = layer(x).detach()
child = os.fork()
if not child:
    os._exit(0 if torch.equal(layer(x), expected) and build.library() else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("compiled" if build.library() else "plain")
"""
    assert ended(start(tmp_path / "cache", program)) == ("compiled", [])


def test_help_does_not_load_torch(tmp_path: Path) -> None:
    program = "import sys, fedcsd.cli.main; assert 'torch' not in sys.modules and 'fedcsd.kernels' not in sys.modules"
    assert ended(start(tmp_path, program)) == ("", [])
