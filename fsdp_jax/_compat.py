"""Private parts of jax, flax, orbax and tyro that this package uses, and why.

They have no public counterpart, and may change in any release. Each is named here
alone; `tests/fsdp/test_compat.py` looks for all of them in every lane of versions.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from typing import Any


@dataclasses.dataclass(frozen=True)
class PrivateName:
    """A private attribute of a module of another package.

    Attributes:
      package: Distribution that has it.
      module: Module, imported when the attribute is first used.
      attribute: Name of the attribute.
      tried: Versions with which it was tried.
    """

    package: str
    module: str
    attribute: str
    tried: tuple[str, ...]

    def get(self) -> Any:
        """Returns the attribute.

        Raises:
          ImportError: If the installed version has no such module or attribute.
        """
        try:
            return getattr(importlib.import_module(self.module), self.attribute)
        except (ImportError, AttributeError) as error:
            version = importlib.metadata.version(self.package)
            raise ImportError(
                f"{self.package} {version} has no {self.module}.{self.attribute}, "
                "which fsdp_jax needs. Install a version that was tried: "
                f"{' or '.join(self.tried)}."
            ) from error

    def replace(self, value: Any) -> Any:
        """Sets the attribute for the whole process, and returns its former value.

        Raises:
          ImportError: If the installed version has no such module or attribute.
        """
        former = self.get()
        setattr(importlib.import_module(self.module), self.attribute, value)
        return former


_JAX = ("0.10.2", "0.12.0.1")
_FLAX = ("0.12.8", "0.12.12")
_ORBAX = ("0.12.8",)
_TENSORSTORE_UTILS = "orbax.checkpoint._src.serialization.tensorstore_utils"

DISTRIBUTED_STATE = PrivateName("jax", "jax._src.distributed", "global_state", _JAX)
"""Client of jax's key-value store, through which processes exchange small values.

`jax.experimental.multihost_utils` offers collectives alone, and these wait forever
for a process that failed.
"""

CLEAN_UP = PrivateName("jax", "jax._src.api", "clean_up", _JAX)
"""What jax does as the process ends, which has no switch.

It takes XLA's memory from threads that still compile.
"""

CLUSTER_ENV = PrivateName("jax", "jax._src.clusters", "ClusterEnv", _JAX)
"""Detection of SLURM, Open MPI and Kubernetes.

`jax.distributed.initialize` detects and connects in one call; here the processes
compare their configuration in between.
"""

ZARR_METADATA = PrivateName(
    "orbax-checkpoint", _TENSORSTORE_UTILS, "_build_zarr3_metadata", _ORBAX
)
"""Function that names the codecs of an array. Orbax has no option for a checksum."""

KVSTORE_SPEC = PrivateName(
    "orbax-checkpoint", _TENSORSTORE_UTILS, "build_kvstore_tspec", _ORBAX
)
"""Function that says where an array is: Orbax knows no stores of TensorStore's."""

LIFT_TRANSFORM = PrivateName(
    "flax", "flax.linen.transforms", "lift_direct_transform", _FLAX
)
"""Lifting that `nn.remat` uses: it passes variables, keys and modules in arguments
through a pure function."""

TYRO_OPTIONS = PrivateName("tyro", "tyro", "_experimental_options", ("1.0.17",))
"""Options of tyro; the one for colours has no public name."""

XLA_BRIDGE_LOGGER = "jax._src.xla_bridge"
"""Logger of jax that reports plugins which cannot be set up."""

ORBAX_FINALIZE = "_finalize"
"""Method of Orbax's manager that commits a step, and removes those that it replaces.

Orbax has no option for what is to be true of a step before older ones are removed.
"""

NNX_STATE_PREFIX = "_pytree__"
"""Beginning of the attributes that flax.nnx keeps in a module for itself."""
