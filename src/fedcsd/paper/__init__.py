"""The paper's tables and figures, each declared as data: what to train, what to measure, what was printed."""
