"""Sharding plan: which device stores which part of each array. No collectives."""
