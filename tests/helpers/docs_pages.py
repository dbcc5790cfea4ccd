"""Follow a page of the documentation like a reader: run its commands and its Python in order, in one folder."""

import argparse
import os
import re
import runpy
import select
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from helpers.docs_rules import GIVEN, environed, ruled, shortened

ROOT = Path(__file__).parents[2]
PROGRAMS = ("fedcsd", "make", "python", "pip", "git", "source", "cd")
SHELL = re.compile(rf"(\w+=\S+ )*({'|'.join(PROGRAMS)}|for|export)\b")
LIMIT = 120  # seconds that one command may take
CARRIED = ("FEDCSD_DATA", "FEDCSD_KERNELS")
"""Variables that a page may set for a command."""


@dataclass(frozen=True)
class Block:
    """A block of a page that a reader types or keeps as a file."""

    kind: str
    text: str
    line: int
    file: str = ""


def blocks(page: str) -> Iterator[Block]:
    """Yield fenced blocks of shell and Python, files (their first line is `# name`), and indented commands."""
    lines = page.split("\n")
    at = 0
    while at < len(lines):
        start = at
        if fence := re.fullmatch(r"(`{3,})(\w*).*", lines[at]):
            at += 1
            while at < len(lines) and lines[at] != fence[1]:
                at += 1
            yield from fenced(fence[2], lines[start + 1 : at], start + 2)
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            while at < len(lines) and lines[at].startswith("    "):
                at += 1
            inside = [line[4:] for line in lines[start:at]]
            if SHELL.match(inside[0]):
                yield Block("shell", "\n".join(inside), start + 1)
            continue
        at += 1


def fenced(language: str, inside: list[str], line: int) -> Iterator[Block]:
    named = re.fullmatch(r"# ([\w./-]+\.\w+)", inside[0]) if inside else None
    text, file = "\n".join(inside) + "\n", named[1] if named else ""
    if language in ("sh", "bash"):
        yield Block("shell", text, line)
    elif language == "console":
        yield Block("shell", "\n".join(part[2:] for part in inside if part.startswith("$ ")), line)
    elif language == "python":
        yield Block("python", text, line, file)
    elif file:
        yield Block("file", text, line, file)


def inline(page: str) -> list[str]:
    """Return the complete commands within sentences and tables."""
    found = re.findall(
        r"`((?:\w+=\S+ )*(?:fedcsd|make|python) [^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.S)
    )
    return [command for command in found if not re.search("…|[A-Z]{3,}(?![=_A-Z])", command)]  # fmt: skip


def preload() -> None:
    """Import slow modules once, before commands are forked."""
    for name in ("matplotlib.pyplot", "sklearn.datasets", "sklearn.manifold", "pyarrow.parquet"):
        import_module(name)
    for name in ("results.comparison", "results.terminal", "results.curves", "results.plots"):
        import_module(f"fedcsd.{name}")


def follow(page: Path, folder: Path) -> None:
    """Run all blocks of a page in an empty folder, which is the current one; raise an error if one fails."""
    preload()
    for name in GIVEN:
        (folder / name).symlink_to(ROOT / name)
    found = list(blocks(page.read_text(encoding="utf-8")))
    for block in found:
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
    names: dict[str, Any] = {}
    for block in found:
        if block.kind == "shell":
            shell(block.text, folder, f"{page.name}:{block.line}")
        elif block.kind == "python":
            code = "\n" * (block.line - 1) + shortened(block.text)
            exec(compile(code, str(page), "exec"), names)


def shell(script: str, folder: Path, where: str) -> None:
    """Run a script with bash, and the programs in it by the rules."""
    ask, answer = os.pipe(), os.pipe()
    functions = [f'{name}() {{ _docs {name} "$@"; }}' for name in PROGRAMS]
    carried = " ".join(f'"${{{name}-}}"' for name in CARRIED)
    functions.append(
        f"_docs() {{ printf '%s\\0' $# {carried} \"$@\" >&{ask[1]}; read -r -u {answer[0]} _s; return $_s; }}"
    )
    text = "set -eu\n" + "\n".join(functions) + "\n" + script
    fds = (ask[1], answer[0])
    bash = subprocess.Popen(["bash", "-c", text], cwd=folder, pass_fds=fds, stdin=subprocess.DEVNULL)
    for fd in fds:
        os.close(fd)
    try:
        said = ""
        for command, environment in requests(ask[0]):
            status, said = carry_out(command, environment, folder)
            os.write(answer[1], b"%d\n" % status)
        status = bash.wait(timeout=LIMIT)
        assert status == 0, f"{where}: ended with {status}:\n{said or script}"
    finally:
        bash.kill()
        bash.wait()
        for fd in (ask[0], answer[1]):
            os.close(fd)


def requests(fd: int) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the shell's requests: a count, the carried variables, and the command, each ended by a NUL."""
    waiting = b""
    while True:
        readable, _, _ = select.select([fd], [], [], LIMIT)
        assert readable, "the shell does nothing"
        more = os.read(fd, 65536)
        if not more:
            return
        waiting += more
        parts = waiting.split(b"\0")
        count = int(parts[0]) + len(CARRIED)
        if len(parts) > count + 1:
            values = [part.decode() for part in parts[1 : count + 1]]
            environment = dict(zip(CARRIED, values, strict=False))
            waiting = b""
            yield values[len(CARRIED) :], {key: value for key, value in environment.items() if value}


def carry_out(
    command: list[str], environment: dict[str, str], folder: Path, how: str = ""
) -> tuple[int, str]:
    """Run one command by the rules in a process of its own; return its exit status, and the command with its output.

    `how` runs less of it than the rules say."""
    command, usual = ruled(command)
    how = usual if usual == "leave" else how or usual
    if how == "leave":
        return 0, ""
    if command[0] == "make":
        lines = recipe(command[1])
        ends = [carry_out(shlex.split(line), environment, folder) for line in lines if how == "recipe"]
        return max(ends, default=(0, ""))
    log = folder / ".log"
    status = forked(lambda: program(command, how), environment, folder, log)
    return status, f"{shlex.join(command)}\n{log.read_text()[-3000:]}"


def recipe(target: str) -> list[str]:
    """Return the fedcsd commands that a target of the Makefile runs."""
    made = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert made.returncode == 0, f"make {target}: {made.stderr}"
    return [line.removeprefix(".venv/bin/") for line in made.stdout.splitlines() if line.startswith(".venv/bin/fedcsd")]  # fmt: skip


def forked(work: Callable[[], None], environment: dict[str, str], folder: Path, log: Path) -> int:
    """Run a function in a fork of this process, which has torch loaded already; return its exit status."""
    child = os.fork()
    if child:
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise AssertionError(f"more than {LIMIT} s")
    status = 1
    try:
        os.chdir(folder)
        os.environ.update(environed(environment))
        sys.stdin, sys.stdout = open(os.devnull), open(log, "w", buffering=1)  # noqa: SIM115
        sys.stderr = sys.stdout
        work()
        status = 0
    except SystemExit as end_of_program:
        code = end_of_program.code
        status = code if isinstance(code, int) else int(code is not None)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
    finally:
        sys.stdout.flush()
        os._exit(status)


class Checked(SystemExit):
    """The end of a command that is checked only as far as this."""


def enough(*_: Any, **__: Any) -> Any:
    raise Checked(0)


def program(command: list[str], how: str) -> None:
    """Run the program itself, or a part of it, within the fork."""
    name, *arguments = command
    if name == "fedcsd":
        from fedcsd.cli import main as cli
        from fedcsd.experiments import running as jobs
        from fedcsd.results import comparison

        if how == "parse":
            parsed(arguments)
            return
        if how == "check":
            jobs.train = comparison.attempt = enough
        cli.main(arguments)
    assert name == "python", f"no rule for {name}"
    if how == "parse":
        read = argparse.ArgumentParser.parse_args
        argparse.ArgumentParser.parse_args = lambda *a, **k: enough(read(*a, **k))  # type: ignore[method-assign]
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


def parsed(arguments: list[str]) -> None:
    """Parse a command line of fedcsd with its settings and methods, and run nothing."""
    import click

    from fedcsd.cli.main import cli
    from fedcsd.config import Settings
    from fedcsd.config.options import checked
    from fedcsd.config.settings import COMPONENTS
    from fedcsd.config.toml import parse_assignments
    from fedcsd.experiments.choices import choices_of

    if "--help" in arguments:
        return
    command = cli.get_command(click.Context(cli), arguments[0])
    if isinstance(command, click.Group) and len(arguments) > 1:
        arguments = arguments[1:]
        command = command.get_command(click.Context(command), arguments[0])
    assert command is not None, f"there is no fedcsd {arguments[0]}"
    if len(arguments) == 1:  # a sentence that names a command
        return
    given = command.make_context(arguments[0], list(arguments[1:])).params
    assigned = parse_assignments(given.get("assignments") or ())
    checked(Settings, {key: value for key, value in assigned.items() if key not in COMPONENTS})
    named = [given[key] for key in ("methods", "method") if given.get(key)]
    for text in named:
        choices_of(text, {})
