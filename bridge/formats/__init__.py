"""How weights lie in files: readers that measure first and read parts, and writers."""
