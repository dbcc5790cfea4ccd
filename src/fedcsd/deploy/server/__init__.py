"""The server's part of the Flower app belongs here: it asks nodes and checks their answers.

The nodes' part belongs to deploy/node/, and what both share to deploy/.
"""
