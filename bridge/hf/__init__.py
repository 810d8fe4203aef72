"""Hugging Face's checkpoints: configs, families' tables, the hub, and export."""
