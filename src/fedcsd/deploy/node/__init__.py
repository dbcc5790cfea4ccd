"""A node's part of a deployment over Flower: it answers for the clients whose data it holds.

Not here: the server's part (deploy/server/).
"""
