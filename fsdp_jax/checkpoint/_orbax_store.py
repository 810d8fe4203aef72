"""Makes Orbax write to object stores as TensorStore knows them.

Orbax 0.12.8 knows Google's store alone, through Google's client library, and no
settings of its own for either. This module replaces the one function that says where
the arrays are (`_compat.KVSTORE_SPEC`), with effect for `StorePath` only.
"""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as ocp

from fsdp_jax._compat import KVSTORE_SPEC
from fsdp_jax.checkpoint._bucket import SCHEMES
from fsdp_jax.checkpoint._paths import is_local
from fsdp_jax.checkpoint._store_path import StorePath

_PREFIXES = tuple(f"/{scheme}:" for scheme in SCHEMES)


def _build_kvstore_tspec(
    directory: str, name: str | None = None, **options: Any
) -> dict[str, Any]:
    spec = _spec_of_orbax(directory, name, **options)
    return _redirected(spec) if directory.startswith(_PREFIXES) else spec


def _redirected(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns the spec with the object store in the place of a file system."""
    if spec["driver"] != "ocdbt":
        folder = StorePath(spec["path"])
        return folder.kvstore_spec() | {"path": folder.key}
    # The manifest needs no spec of its own: each write to an object is atomic.
    rest = {name: value for name, value in spec.items() if name != "manifest"}
    return rest | {"base": StorePath(spec["base"]["path"]).kvstore_spec()}


def atomicity(directory: Any) -> ocp.options.AtomicityOptions:
    """Returns how Orbax commits a step: by a marker where nothing can be renamed."""
    mode = ocp.options.AtomicityMode
    kind = mode.AUTO if is_local(directory) else mode.COMMIT_FILE
    return ocp.options.AtomicityOptions(kind)


_spec_of_orbax = KVSTORE_SPEC.replace(_build_kvstore_tspec)
