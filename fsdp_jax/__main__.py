"""`python -m fsdp_jax` is `fsdp-jax`."""

import sys

from fsdp_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
