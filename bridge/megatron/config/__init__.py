"""Megatron's settings of a model and of a run, to and from `DecoderConfig`."""
