"""Generation of an elastic job: its number of replicas, and its microbatches."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

# Set by `fsdp-jax launch --elastic` in each process.
_NUMBER = "FSDP_JAX_GENERATION"
_REPLICAS = "FSDP_JAX_REPLICAS"
_MAX_REPLICAS = "FSDP_JAX_MAX_REPLICAS"
# Set too if the launcher was given `--global-batch`.
_GLOBAL_BATCH = "FSDP_JAX_GLOBAL_BATCH"


@dataclasses.dataclass(frozen=True)
class Generation:
    """Processes of an elastic job that run together until the next restart.

    Attributes:
      number: Number of the generation, from 0.
      num_replicas: Number of replicas in it, the size of the mesh axis `dp_outer`.
      max_replicas: Number of replicas of the complete job.
      global_batch: Rows of a step that the launcher chose the replicas for; None if it
        knows no number.

    Raises:
      ValueError: If there are no replicas, more than `max_replicas`, or no rows.
    """

    number: int = 0
    num_replicas: int = 1
    max_replicas: int = 1
    global_batch: int | None = None

    def __post_init__(self):
        if self.number < 0 or not 1 <= self.num_replicas <= self.max_replicas:
            raise ValueError(
                f"Generation({self.number}) has {self.num_replicas} of "
                f"{self.max_replicas} replicas: numbers start from 0, replicas from 1, "
                "and max_replicas is the largest number of them."
            )
        if self.global_batch is not None and self.global_batch < 1:
            raise ValueError(
                f"Generation({self.number}) has global_batch={self.global_batch}: at "
                "least 1 row."
            )

    @property
    def is_complete(self) -> bool:
        """Whether it has all replicas."""
        return self.num_replicas == self.max_replicas

    def microbatches_for(
        self, global_batch: int, num_microbatches: int = 1, *, data_ranks: int = 1
    ) -> int:
        """Returns the microbatches of a step that keep the global batch.

        A microbatch of a replica has at most the rows that it has in the complete job,
        so that a step takes no more memory.

        Args:
          global_batch: Number of rows of a step.
          num_microbatches: Number of microbatches in the complete job.
          data_ranks: Number of data ranks of one replica, which split the rows of a
            microbatch; `dp_shard` without other axes.

        Returns:
          Number of microbatches for `make_train_step`.

        Raises:
          ValueError: If the rows do not divide so, or the launcher was given another
            number of rows.

        Examples:
          >>> half = fsdp.launch.Generation(1, num_replicas=2, max_replicas=4)
          >>> half.microbatches_for(64, 2)
          4
        """
        if min(global_batch, num_microbatches, data_ranks) < 1:
            raise ValueError(
                f"global_batch={global_batch}, num_microbatches={num_microbatches}, "
                f"data_ranks={data_ranks}: each must be at least 1."
            )
        if self.global_batch not in (None, global_batch):
            raise ValueError(
                f"global_batch={global_batch}, but the launcher chose the replicas for "
                f"--global-batch {self.global_batch}: use one number for both."
            )
        rows, rest = divmod(global_batch, self.num_replicas * data_ranks)
        least = -(-num_microbatches * self.max_replicas // self.num_replicas)
        fitting = (k for k in range(least, rows + 1) if rows % k == 0)
        found = None if rest else next(fitting, None)
        if found is None:
            raise ValueError(
                f"A global batch of {global_batch} rows does not divide over "
                f"{self.num_replicas} replicas of {data_ranks} data ranks in at least "
                f"{least} microbatches ({num_microbatches} with {self.max_replicas} "
                "replicas): choose a number of rows with more divisors."
            )
        return found

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that `generation` reads."""
        found = {
            _NUMBER: str(self.number),
            _REPLICAS: str(self.num_replicas),
            _MAX_REPLICAS: str(self.max_replicas),
        }
        if self.global_batch is not None:
            found[_GLOBAL_BATCH] = str(self.global_batch)
        return found


def generation(environment: Mapping[str, str] | None = None) -> Generation | None:
    """Returns the generation of this process; None if its job is not elastic.

    Args:
      environment: Environment variables, default those of the process.

    Raises:
      ValueError: If the launcher's variables are incomplete or wrong.

    Examples:
      >>> fsdp.launch.generation() is None  # started without `launch --elastic`
      True
    """
    variables = os.environ if environment is None else environment
    given = {name: variables.get(name) for name in (_NUMBER, _REPLICAS, _MAX_REPLICAS)}
    if set(given.values()) == {None}:
        return None
    names = ", ".join(given)
    if _GLOBAL_BATCH in variables:
        given[_GLOBAL_BATCH] = variables[_GLOBAL_BATCH]
    wrong = {k: v for k, v in given.items() if v is None or not v.isdecimal()}
    if wrong:
        shown = ", ".join(f"{name}={value}" for name, value in wrong.items())
        raise ValueError(
            f"{shown}: `fsdp-jax launch --elastic` sets {names} to numbers, "
            f"and {_GLOBAL_BATCH} with --global-batch; start the program with its "
            "whole environment."
        )
    return Generation(*(int(value) for value in given.values() if value is not None))
