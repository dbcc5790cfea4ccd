"""This room holds settings and options: their descriptions and checks, files and assignments of them.
It does not hold methods, models or data; their names stay text here."""

from fedcsd.config.options import option
from fedcsd.config.settings import Settings

__all__ = ["Settings", "option"]
