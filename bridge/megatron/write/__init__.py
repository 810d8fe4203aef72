"""Checkpoints as Megatron writes them."""
