"""Make the paper's tables and figures, which are declared as data, with experiments/ and results/.
This package knows nothing of the command line, and nothing below it imports it.
"""
