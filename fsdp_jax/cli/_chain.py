"""Hash chain over the checkpoints of a run, which `fsdp-jax audit` verifies.

The link of a step is part of its metadata, which its manifest covers. It holds digests
of the state, code, plan and options, the position in the data, and the digest of the
previous checkpoint's link.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

import fsdp_jax as fsdp

KEY = "chain"
"""Name of the link in the metadata of a step."""

_SECTIONS = ("batches", "optimizer", "precision", "experts", "lora", "strategy")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_FIELDS = ("code", "plan", "options", "tokens")


@dataclasses.dataclass(frozen=True)
class Link:
    """Digests of the inputs that a checkpoint was computed from.

    Attributes:
      step: Number of the step.
      state: `StateDigest.sha256` of the state.
      position: Position of the next batch in the data.
      tokens: Digest of the tokens of the data.
      code: Digest of the source of both packages, and of the versions of jax, flax,
        optax and numpy.
      plan: Digest of the plan: mesh, splits and dtypes.
      options: Digest of the options on which the numbers depend.
      before: Digest of the previous checkpoint's link; None for the first.
      before_step: Number of that checkpoint; None for the first.
    """

    step: int
    state: str
    position: dict[str, Any]
    tokens: str
    code: str
    plan: str
    options: str
    before: str | None
    before_step: int | None = None

    @property
    def digest(self) -> str:
        """Digest of the link."""
        fields = dataclasses.asdict(self)
        if self.before_step is None:  # As links without the field were counted.
            del fields["before_step"]
        return _sha256(fields)


class Chain:
    """Makes the links of a run.

    Args:
      plan: Plan of the model.
      options: Options of the run, by section.
      tokens: Digest of the tokens of the data.
      before: Digest of the link that the run resumes from; None for none.
      before_step: Number of the step of that link; None for none.
    """

    def __init__(
        self,
        plan: fsdp.Plan,
        options: Mapping[str, Any],
        tokens: str,
        before: str | None,
        before_step: int | None = None,
    ):
        self._plan = hashlib.sha256(repr(plan).encode()).hexdigest()
        self._options = options_digest(options)
        self._tokens, self._before, self._before_step = tokens, before, before_step
        self._newest: Link | None = None

    def link(
        self, step: int, state: fsdp.TrainState, position: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the link of a step, for its metadata.

        Args:
          step: Number of the step.
          state: State after it.
          position: Position of the next batch.
        """
        state_sha256 = fsdp.replay.state_digest(state).sha256
        self._newest = Link(
            step,
            state_sha256,
            position,
            self._tokens,
            code_digest(),
            self._plan,
            self._options,
            self._before,
            self._before_step,
        )
        return dataclasses.asdict(self._newest)

    def advance(self) -> None:
        """Makes the newest link the predecessor of those that follow."""
        if self._newest is not None:
            self._before, self._before_step = self._newest.digest, self._newest.step


def read_link(path: Path, step: int) -> Link:
    """Reads the link of a step.

    Args:
      path: Directory of the run.
      step: Number of the step.

    Raises:
      ValueError: If the step has none.
    """
    found = link_in(fsdp.checkpoint.load_metadata(path, step=step))
    if found is None:
        raise ValueError(
            f"Step {step} of '{path}' has no link of a chain: train with --chain."
        )
    return found


def link_in(metadata: Mapping[str, Any] | None) -> Link | None:
    """Returns the link in the metadata of a step; None if it has none."""
    stored = (metadata or {}).get(KEY)
    return None if stored is None else Link(**stored)


def stored_digest(path: Path, step: int) -> str:
    """Returns the digest of the state that a step holds, split over all devices.

    Args:
      path: Directory of the run.
      step: Number of the step.
    """
    return fsdp.replay.state_digest(stored_state(path, step)).sha256


def stored_state(path: Path, step: int) -> dict[str, Any]:
    """Loads the leaves that a step holds by name, split over all devices.

    Args:
      path: Directory of the run.
      step: Number of the step.
    """
    mesh = fsdp.make_mesh()
    like = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, _spec(leaf, mesh.size))
        )
        for name, leaf in fsdp.checkpoint.load_shapes(path, step=step).items()
    }
    return fsdp.load(path, like, step=step)


def broken_links(links: Mapping[int, Link]) -> list[str]:
    """Returns a message for each link that does not follow from the one before it.

    Args:
      links: Links by the numbers of their folders, in ascending order.
    """
    wrong = [
        f"step {number}: its link is of step {link.step}"
        for number, link in links.items()
        if link.step != number
    ]
    steps = list(links.items())
    for (_, before), (number, link) in zip(steps, steps[1:], strict=False):
        # The steps between them may have been removed, as --keep-best does.
        is_next = link.before_step in (None, before.step)
        if is_next and link.before != before.digest:
            wrong.append(f"step {number}: not made from step {before.step} as it is")
        wrong += [
            f"step {number}: other {field} than step {before.step}"
            for field in _FIELDS
            if getattr(link, field) != getattr(before, field)
        ]
    return wrong


def options_digest(options: Mapping[str, Any]) -> str:
    """Returns the digest of the options that determine the numbers of a run.

    Args:
      options: Options by section, as in the file of a run.
    """
    return _sha256({name: options[name] for name in _SECTIONS if name in options})


@functools.cache
def code_digest() -> str:
    """Returns the digest of the source of both packages, and of the versions."""
    root = Path(fsdp.__file__).parents[1]
    digest = hashlib.sha256()
    for package in ("bridge", "fsdp_jax"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return _sha256([digest.hexdigest(), versions])


def _spec(leaf: Any, devices: int) -> PartitionSpec:
    """Splits the first dim that all devices divide."""
    even = (dim for dim, size in enumerate(leaf.shape) if size and not size % devices)
    dim = next(even, None)
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "dp_shard")


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
