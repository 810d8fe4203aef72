"""Context-parallel attention: the sequence is split over the ranks of `cp`."""
