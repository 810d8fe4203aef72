"""What is alive in memory, from the trace of a step."""
