"""A deployment trains over Flower: what the server (server/) and the nodes (node/) share belongs here, and its setup.

The round loop is that of federation/, a run's folder that of experiments/.
"""
