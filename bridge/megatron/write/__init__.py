"""Writers of Megatron checkpoints."""
