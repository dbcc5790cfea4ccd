"""From runs to what people look at: tables, plots and the report page.

Not here: training (experiments/) and the tables of the paper (paper/).
"""
