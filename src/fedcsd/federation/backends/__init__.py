"""Where clients run: processes on this machine's cores, or streams of one GPU.

Not here: how one client trains (training/), and clients on other machines (deploy/).
"""
