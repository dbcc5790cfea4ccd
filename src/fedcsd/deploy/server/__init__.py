"""The server's part of a deployment over Flower.

Not here: the nodes' part (deploy/node/) and what both share (deploy/).
"""
