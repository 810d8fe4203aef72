"""Modules that run inside `shard_map`: units, their collectives, and the loss."""
