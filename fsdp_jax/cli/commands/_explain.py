"""`fsdp-jax explain`: where the time of a profiled step goes, beside the plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro

from fsdp_jax.cli._errors import check_absent
from fsdp_jax.cli._options import Unset
from fsdp_jax.planner import Explanation, read_plan, read_profile


@dataclasses.dataclass(frozen=True)
class Explain:
    """Lay a profile of a real run beside its plan, unit by unit.

    Prints for each unit the milliseconds of a step that it computes and communicates,
    as measured on one GPU, and as modelled by fsdp-jax plan.

    Attributes:
      profile: Profile of a run on GPUs: the directory that fsdp-jax train --profile
        wrote, or an .xplane.pb file.
      plan: File that fsdp-jax plan --json wrote for the same model and mesh.
      device: Number of the GPU among all of the profile.
      steps: Number of steps in the profile; default counted.
      json: Writes everything to this file.
    """

    profile: Annotated[Path, tyro.conf.Positional]
    plan: Unset[Path] = None
    device: int = 0
    steps: Unset[int] = None
    json: Unset[Path] = None

    def run(self) -> None:
        """Prints the table."""
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"--steps {self.steps} must be at least 1.")
        if self.json is not None:
            check_absent(self.json, "--json")
        planned = None if self.plan is None else read_plan(self.plan)
        profiled = read_profile(self.profile, device=self.device, steps=self.steps)
        found = Explanation(profiled, planned)
        print(found)
        if self.json is not None:
            self.json.write_text(json.dumps(found.to_dict(), indent=1) + "\n")
