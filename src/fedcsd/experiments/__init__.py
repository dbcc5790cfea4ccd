"""Prepare, start, resume, compare and track runs, from settings to the files of a run.

Not here: what becomes of finished runs in tables and pictures (results/).
"""
