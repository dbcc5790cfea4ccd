"""A federation over Flower: real nodes, each with its own data, or Flower's simulation on a Ray cluster."""
