"""Experts that are split over ranks."""
