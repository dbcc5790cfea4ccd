"""The report page of runs: one HTML file, or served while runs train.

Not here: tables and plots for a paper (results/).
"""
