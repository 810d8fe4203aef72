"""Losses and entropies over a vocabulary that is split over ranks."""
