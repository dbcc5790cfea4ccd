"""The report of one or many runs: one HTML page that needs no network, written to a file or served live."""
