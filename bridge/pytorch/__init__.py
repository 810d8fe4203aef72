"""Any PyTorch model, by rules that are said or proposed."""
