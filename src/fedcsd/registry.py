"""Finds what is defined in one file each: a name is a file's name, nothing is registered by hand."""

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

from fedcsd.errors import unknown


class Registry:
    """The modules of a package by name, listed without importing them.

    A file whose name begins with an underscore is code that the others share and is not listed. `pick`
    takes a module and gives the thing it defines; by default what bears the module's name.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        *,
        exclude: tuple[str, ...] = (),
        pick: Callable[[Any], Any] | None = None,
    ):
        self.kind, self.package, self.exclude = kind, package, exclude
        self.pick = pick or (lambda module: getattr(module, module.__name__.rpartition(".")[2]))

    @property
    def names(self) -> list[str]:
        package = import_module(self.package)
        found = (m.name for m in pkgutil.iter_modules(package.__path__))
        return sorted(name for name in found if name not in self.exclude and not name.startswith("_"))

    def load(self, name: str) -> Any:
        if name not in self.names:
            raise unknown(self.kind, name, self.names)
        return self.pick(import_module(f"{self.package}.{name}"))
