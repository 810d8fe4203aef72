"""`fsdp-jax completion`: the script with which a shell completes commands."""

from __future__ import annotations

import dataclasses
from typing import Literal

import tyro

Shell = Literal["bash", "zsh", "fish"]


@dataclasses.dataclass(frozen=True)
class Completion:
    """Print the script with which a shell completes commands and options.

        eval "$(fsdp-jax completion bash)"          # in ~/.bashrc
        fsdp-jax completion zsh > ~/.zfunc/_fsdp-jax
        fsdp-jax completion fish > ~/.config/fish/completions/fsdp-jax.fish

    Attributes:
      shell: Shell to complete in.
    """

    shell: tyro.conf.Positional[Shell]
