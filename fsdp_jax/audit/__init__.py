"""Whether a compiled step does what its plan says."""
