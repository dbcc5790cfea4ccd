"""The methods: each file defines one, and a method's name is its file's name."""

import pkgutil
from importlib import import_module
from typing import Any

from fedcsd.methods import _own
from fedcsd.methods.base import Ask, Method, Server


class Methods:
    """Lists the built-in methods without importing them; loads these and users' own by name.

    The others share the code in files whose names begin with an underscore.
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
