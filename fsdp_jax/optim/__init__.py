"""Optimizer transformations: 8-bit state, layer-wise updates, stochastic rounding."""
