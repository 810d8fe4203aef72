"""Rules that map checkpoint tensors to tree leaves: layouts, pieces, validation."""
