"""`python -m fsdp_jax.cli` is `fsdp-jax`."""

from fsdp_jax.cli import run

if __name__ == "__main__":
    run()
