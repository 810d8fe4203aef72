"""Audit of compiled steps: compares their collectives and shardings with the plan."""
