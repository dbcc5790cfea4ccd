"""From settings to a run on disk: prepare, start, resume, compare, track.

Not here: what becomes of finished runs in tables and pictures (results/).
"""
