"""Data as people have it on disk; a package, so that its conftest does not take the place of the one above."""
