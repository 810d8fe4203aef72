"""What happens inside `shard_map`."""
