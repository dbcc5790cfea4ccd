"""Write a file to start your own method from (`fedcsd new-method`)."""

import builtins
import keyword
import re
import shlex
from pathlib import Path

import rich_click as click

from fedcsd.errors import UserError
from fedcsd.files import writing


@click.command(name="new-method")
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE.py")
@click.option("--name", metavar="CLASS", help="its class  [dim](default: MyMethod for my_method.py)[/dim]")
def new_method(path: Path, name: str | None) -> None:
    """Write a method to start your own from: small, commented, and ready to run.

    \b
      fedcsd new-method my_method.py
      fedcsd run --method my_method.py:MyMethod
    """
    path = path.expanduser()
    if path.name in ("", ".."):
        raise UserError(f"{path} is a folder: name a file, such as {path / 'my_method.py'}")
    path = path if path.suffix else path.with_suffix(".py")
    default = class_name(path)
    name = default if name is None else name
    text = method_text(path.name, name)
    if path.exists():
        raise UserError(f"{path} exists already: choose another name")
    with writing(path):
        path.write_text(text, encoding="utf-8")
    own = shlex.quote(f"{path}:{name}")
    print(f"written: {path}")
    print(f"run it:      fedcsd run --method {own}")
    print(f"compare it:  fedcsd compare --methods fedavg,{own} --seeds 0,1,2 --out runs/{name}")
    print("what a method can do: the page on own methods of fedcsd's documentation (docs/own-method.md)")


def class_name(path: Path) -> str:
    """Return the class's name for a file: MyMethod for my_method.py."""
    if path.suffix != ".py":
        raise UserError(f"{path.name} is no Python file: its name must end in .py")
    if not path.stem.isidentifier() or keyword.iskeyword(path.stem):
        plain = re.sub(r"\W+", "_", path.stem).strip("_").lower()
        plain = f"my_{plain}" if keyword.iskeyword(plain) or not plain.isidentifier() else plain
        raise UserError(f"Python cannot import a file called {path.name}: call it {plain}.py")
    return "".join(word[0].upper() + word[1:] for word in path.stem.split("_") if word) or "MyMethod"


def method_text(file: str, name: str) -> str:
    """Return the template with the names of the file and its class in it."""
    from importlib.resources import files  # slow to import, and nothing else here needs it

    text = files("fedcsd").joinpath("templates/my_method.py").read_text(encoding="utf-8")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(f"{name!r} is no name for a class: use letters and digits, such as --name MyMethod")
    if (name != "MyMethod" and re.search(rf"\b{name}\b", text)) or hasattr(builtins, name):
        raise UserError(f"{name} is the name of something else: choose another with --name, such as My{name}")
    # Replacement by a function keeps a backslash in a name.
    text = re.sub(r"\bmy_method\.py\b", lambda _: file, text)
    return re.sub(r"\bMyMethod\b", lambda _: name, text)
