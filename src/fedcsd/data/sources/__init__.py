"""Data sets by name. Each file defines one function of the file's name that returns a Dataset."""
