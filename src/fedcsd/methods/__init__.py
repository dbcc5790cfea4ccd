"""The methods, one file each; a method's name is its file's name."""

from types import ModuleType
from typing import Any

from fedcsd.methods import _own
from fedcsd.methods.base import Ask, Method, Server
from fedcsd.registry import Registry


def _method_of(module: ModuleType) -> type[Method]:
    """The method that a file defines: its one public subclass of Method."""
    found = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, Method) and c.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{module.__name__} must define one method, it defines {len(found)}"
    return found[0]


class Methods(Registry):
    """The built-in methods by name; `load` also finds installed ones, files and modules (see naming.py)."""

    def load(self, name: str) -> Any:
        return super().load(name) if name in self.names else _own.find(str(name), self.names)


methods = Methods("method", __name__, exclude=("base",), pick=_method_of)

__all__ = ["Ask", "Method", "Server", "methods"]
