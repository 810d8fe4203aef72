"""`fsdp-jax schema`: prints the JSON schema of files that describe a run."""

from __future__ import annotations

import dataclasses
import json

from fsdp_jax.cli._option_schema import schema_of
from fsdp_jax.cli.commands._train import Train


@dataclasses.dataclass(frozen=True)
class Schema:
    """Print the JSON schema of run files, with which editors complete and check them.

    A file names it in its first line: # yaml-language-server: $schema=run.schema.json
    """

    def run(self) -> None:
        """Prints the schema."""
        draft = "https://json-schema.org/draft/2020-12/schema"
        print(json.dumps({"$schema": draft, **schema_of(Train)}, indent=2))
