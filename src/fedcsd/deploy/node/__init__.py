"""The nodes' part of the Flower app belongs here: a node answers for the client whose data it holds.

The server's part belongs to deploy/server/.
"""
