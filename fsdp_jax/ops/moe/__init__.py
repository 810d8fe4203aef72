"""Expert parallelism: dispatch of tokens, and balance of routers."""
