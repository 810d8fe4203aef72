"""Bytes on their way: from sources into shards, and from leaves into files."""
