"""A backend carries requests to clients and replies back: in processes, or on streams of one GPU.

It does not train (training/) and does not know the round loop (federation/rounds.py).
"""
