"""Study a trained run: drift, forgetting, t-SNE of features.

Not here: what every run records by itself (experiments/, measurements).
"""
