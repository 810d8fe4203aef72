"""Makes Mistral 4 known to transformers as a causal model, which 5.24 leaves out."""

from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
