"""Conversion of Megatron's model and run settings to and from `DecoderConfig`."""
