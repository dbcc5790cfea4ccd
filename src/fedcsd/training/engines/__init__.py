"""Ways to carry out the steps of local training: one by one, recorded on a GPU, or many clients as one.

Not here: what is trained (training/task.py) and which client trains where (federation/backends/).
"""
