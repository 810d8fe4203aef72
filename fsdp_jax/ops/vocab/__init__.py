"""Losses over a vocabulary that is split."""
