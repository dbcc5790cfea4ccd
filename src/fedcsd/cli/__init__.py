"""Read the command line: each command has a file, which reads its options, calls one function and prints.

What a command does belongs to experiments/, results/, paper/ and deploy/.
"""
