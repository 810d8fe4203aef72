"""Checkpoints on the disks of the hosts, with copies on peers."""
