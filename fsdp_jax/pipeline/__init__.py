"""Stages: schedules, what moves between them, gradients."""
