"""This room has the server: round loop, cohort, evaluation, ledger of bytes, clients' states.

Local training (training/), averages (aggregation.py) and files of runs (experiments/) do not belong here.
"""
