"""Low-rank adapters: configuration, factored products, quantized base weights."""
