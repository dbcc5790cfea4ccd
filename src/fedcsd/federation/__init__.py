"""What happens at the server: the round loop, the cohort, evaluation, the ledger of bytes, clients' states.

Not here: local training (training/), the arithmetic of averages (aggregation.py) and files of runs (experiments/).
"""
