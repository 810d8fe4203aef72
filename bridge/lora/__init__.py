"""PEFT's LoRA adapters, merged into the weights or kept beside them."""
