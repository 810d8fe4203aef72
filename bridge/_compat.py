"""Private parts of jax that this package uses, each with a reason.

They have no public counterpart, and may change in any release. Each is named here
alone; `tests/fsdp/test_compat.py` looks for all of them in every lane of versions.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax

_TRIED = ("0.10.2", "0.12.0.1")


@dataclasses.dataclass(frozen=True)
class PrivateName:
    """A private attribute of a module of jax.

    Attributes:
      module: Module, imported when the attribute is first used.
      attribute: Name of the attribute.
    """

    module: str
    attribute: str

    def get(self) -> Any:
        """Returns the attribute.

        Raises:
          ImportError: If the installed jax has no such module or attribute.
        """
        try:
            return getattr(importlib.import_module(self.module), self.attribute)
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"jax {jax.__version__} has no {self.module}.{self.attribute}, which "
                f"bridge needs. Install a version that was tried: "
                f"{' or '.join(_TRIED)}."
            ) from error


DISTRIBUTED_STATE = PrivateName("jax._src.distributed", "global_state")
"""Client of jax's key-value store, through which processes agree on failures.

`jax.experimental.multihost_utils` offers collectives alone, and these wait forever for
a process that failed.
"""

CUDNN_ATTENTION = PrivateName("jax._src.cudnn", "fused_attention_stablehlo")
"""cuDNN's attention with a stated version; the public function asks this machine's."""
