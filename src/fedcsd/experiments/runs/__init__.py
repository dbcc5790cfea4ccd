"""Keep a run on disk: its folder, checkpoints, provenance, and the archive of many runs.

Not here: what trains a run or continues it (experiments/).
"""
