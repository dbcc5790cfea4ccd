"""What happens at a client: its data, its models, the steps of local training.

Not here: who is asked and what becomes of the replies (federation/), and what a method computes (methods/).
"""

from fedcsd.training.client import Client
from fedcsd.training.task import Batch, Loss

__all__ = ["Batch", "Client", "Loss"]
