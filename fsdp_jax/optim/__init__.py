"""Optimizer state: in eight bits, by layer, on the host."""
