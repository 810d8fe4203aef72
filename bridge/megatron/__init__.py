"""Megatron-Core's files and buffers, read without Megatron and without torch."""

from bridge.megatron import buckets as buckets
