"""Conversion of any PyTorch model, by given or proposed rules."""
