"""The package's version, apart from the facade so that every module can import it."""

__version__ = "0.1.0"
