"""The methods, one file each; a method's name is its file's name."""

import pkgutil
from importlib import import_module
from types import ModuleType
from typing import Any

from fedcsd.methods import _own
from fedcsd.methods.base import Ask, Method, Server


def _method_of(module: ModuleType) -> type[Method]:
    """The method that a file defines: its one public subclass of Method."""
    found = list(_own.methods_in(module).values())
    assert len(found) == 1, f"{module.__name__} must define one method, it defines {len(found)}"
    return found[0]


class Methods:
    """The built-in methods by name, listed without importing them; `load` also finds installed ones, files
    and modules (see plugins.py). A file whose name begins with an underscore is code that the others share."""

    @property
    def names(self) -> list[str]:
        found = (module.name for module in pkgutil.iter_modules(__path__))
        return sorted(name for name in found if name != "base" and not name.startswith("_"))

    def load(self, name: str) -> Any:
        if name not in self.names:
            return _own.find(str(name), self.names)
        return _method_of(import_module(f"{__name__}.{name}"))


methods = Methods()

__all__ = ["Ask", "Method", "Server", "methods"]
