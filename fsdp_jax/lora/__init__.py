"""Low-rank adapters and the products with them."""
