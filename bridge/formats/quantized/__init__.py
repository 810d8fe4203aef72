"""Quantized checkpoints, decoded when they are read; one file per format."""
