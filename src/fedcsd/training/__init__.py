"""Train at a client: its data, its models, the steps of SGD.

Not here: which clients take part and what becomes of their replies (federation/), what a method computes (methods/).
"""

from fedcsd.training.batch import Batch, Loss
from fedcsd.training.client import Client

__all__ = ["Batch", "Client", "Loss"]
