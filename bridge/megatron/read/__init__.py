"""Megatron's checkpoints of every format, read."""
