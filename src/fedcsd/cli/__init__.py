"""The commands of the program belong here, a file each; a command reads its options, calls one function and prints.

What a command does belongs to experiments/, results/, paper/ and deploy/.
"""
