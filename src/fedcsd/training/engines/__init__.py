"""Ways to take the steps of local training: one by one, recorded on a GPU, or many clients in one step.

Not here: what is trained (training/task.py) and which client trains in which lane (federation/backends/).
"""
