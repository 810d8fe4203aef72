"""Batches of each host."""
