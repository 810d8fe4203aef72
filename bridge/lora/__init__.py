"""PEFT's adapters, merged or beside the weights."""
