"""The commands of the program, a file for each group; options are made from the settings.

Not here: what a command does (experiments/, results/, paper/, deploy/).
"""
