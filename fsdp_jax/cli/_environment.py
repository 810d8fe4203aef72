"""Versions of packages and settings of the environment, and problems with them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Iterator, Mapping

from fsdp_jax.training._compiler_options import release

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "torch")
_PLUGINS = tuple(
    f"jax-cuda{cuda}-{part}" for cuda in (12, 13) for part in ("plugin", "pjrt")
)

Versions = Mapping[str, str | None]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem and its fix.

    Attributes:
      what: Problem.
      fix: Way to fix it.
      is_wrong: Whether something fails; otherwise the finding is advice.
    """

    what: str
    fix: str
    is_wrong: bool = True


def versions() -> dict[str, str | None]:
    """Returns the versions of packages; None for one that is not installed."""
    found = {name: _version(name) for name in (*_PACKAGES, *_PLUGINS)}
    return {"python": platform.python_version(), **found}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def plugins(versions: Versions) -> dict[str, str]:
    """Returns the versions of the installed packages of XLA for GPUs."""
    return {name: found for name in _PLUGINS if (found := versions.get(name))}


def check_versions(versions: Versions) -> Iterator[Finding]:
    """Yields problems with versions that do not fit together."""
    jax, jaxlib, flax = (versions.get(name) for name in ("jax", "jaxlib", "flax"))
    if jax and jaxlib and jax != jaxlib:
        yield Finding(
            f"jax {jax} with jaxlib {jaxlib}: they are made for each other.",
            f"pip install --upgrade jax=={jax} jaxlib=={jax}",
            is_wrong=False,
        )
    # flax 0.12.8 imports names that jax 0.11.1 took away.
    if jax and flax and release(jax) >= (0, 11, 1) and release(flax) <= (0, 12, 8):
        yield Finding(
            f"flax {flax} cannot be imported on jax {jax}.",
            "On Python 3.12 or later: pip install --upgrade flax. On 3.11: "
            "pip install jax==0.10.2 flax==0.12.8",
        )
    for name, version in plugins(versions).items():
        if jaxlib and version != jaxlib:
            yield Finding(
                f"{name} {version} does not fit jaxlib {jaxlib}.",
                f"pip install --upgrade {name}=={jaxlib}",
            )


_FRACTION = "XLA_CLIENT_MEM_FRACTION"
_OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_DEFAULTS = {
    _FRACTION: "unset: 0.75",
    _OLD_FRACTION: "unset",
    _PREALLOCATE: "unset: true",
    "JAX_PLATFORMS": "unset: GPUs where there are any",
    "JAX_COMPILATION_CACHE_DIR": "unset: every run compiles anew",
    "JAX_ENABLE_PGLE": "unset: false",
}


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of jax in the environment, with defaults."""
    return {name: environ.get(name) or default for name, default in _DEFAULTS.items()}


def check_settings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields problems with settings that jax refuses when it starts a GPU."""
    given = [name for name in (_FRACTION, _OLD_FRACTION) if environ.get(name)]
    if len(given) == 2:
        yield Finding(
            f"{_FRACTION} and {_OLD_FRACTION} are both set, which jax refuses.",
            f"unset {_OLD_FRACTION}, the old name",
        )
    for name in given:
        if not _is_positive(environ[name]):
            yield Finding(
                f"{name}={environ[name]} is not a share of the memory.",
                f"export {name}=0.75, or another number above 0",
            )


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False
