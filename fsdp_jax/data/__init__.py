"""Batches per host, and their placement on devices."""
