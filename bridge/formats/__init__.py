"""File formats of weights: lazy readers, which read headers first, and writers."""
