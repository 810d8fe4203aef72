"""Reads compiled programs."""
