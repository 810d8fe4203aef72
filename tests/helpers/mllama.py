"""Makes Llama 3.2 Vision's text part known to transformers as a causal model.

transformers 5.24 knows the class by the config of the multimodal model alone.
"""

from transformers import AutoModelForCausalLM, MllamaForCausalLM, MllamaTextConfig

AutoModelForCausalLM.register(MllamaTextConfig, MllamaForCausalLM, exist_ok=True)
