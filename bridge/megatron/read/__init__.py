"""Readers of Megatron checkpoints in all formats."""
