"""This room has the methods, one a file; a method's name is its file's name.

The server's loop (federation/) and the client's training (training/) do not belong here.
"""

import pkgutil
from importlib import import_module
from typing import Any

from fedcsd.methods import _own
from fedcsd.methods.base import Ask, Method, Server


class Methods:
    """The registry lists built-in methods without importing them, and loads these and users' own.

    A file whose name begins with an underscore has code that the others share.
    """

    @property
    def names(self) -> list[str]:
        found = (module.name for module in pkgutil.iter_modules(__path__))
        return sorted(name for name in found if name != "base" and not name.startswith("_"))

    def load(self, name: str) -> Any:
        """Return the class of a method, built in, installed, or of a file or module."""
        if name not in self.names:
            return _own.find(str(name), self.names)
        (method,) = _own.methods_in(import_module(f"{__name__}.{name}")).values()
        return method


methods = Methods()

__all__ = ["Ask", "Method", "Server", "methods"]
