"""Streaming of weights from sources into shards, and from leaves into files."""
