"""Reward model: the decoder with a score head, which starts from a language model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from bridge.models import DecoderConfig
from fsdp_jax._tree import PyTree
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._model_source import Origin

_SCORE, _HEAD = "score", "lm_head"


@dataclasses.dataclass(frozen=True)
class WithScoreHead:
    """A language model whose output projection a random score head replaces.

    Attributes:
      origin: Language model.
      mesh: Device mesh.
      seed: Seed of the score head.
    """

    origin: Origin
    mesh: Mesh
    seed: int

    @property
    def config(self) -> DecoderConfig:
        """Config of the language model."""
        return self.origin.config

    @property
    def files(self) -> Path | None:
        """Directory with the model's tokenizer; None if there is none."""
        return self.origin.files

    def load_params(self, like: PyTree) -> PyTree:
        """Loads the weights like `like`, and draws the score head.

        Args:
          like: Abstract parameters of a `ScoredDecoder`.
        """
        body = {name: tree for name, tree in _parts(like).items() if name != _SCORE}
        if not self.config.tie_word_embeddings or self.config.head_bias:
            plan = plan_decoder(self.config, self.mesh)
            # The strict load reads every tensor of the model: this one is dropped.
            body[_HEAD] = _parts(plan.params)[_HEAD]
        params = _parts(self.origin.load_params(nnx.State(body)))
        found = {name: tree for name, tree in params.items() if name != _HEAD}
        return nnx.State({**found, _SCORE: self._draw(_parts(like)[_SCORE])})

    def lazy_params(self) -> PyTree:
        """Raises a `ValueError`: a drawn score head is in no file."""
        raise ValueError("A newly initialized score head cannot be read from files.")

    def _draw(self, like: PyTree) -> PyTree:
        """Draws the kernel as transformers does: normal, of `initializer_range`."""
        normal = jax.nn.initializers.normal(self.config.initializer_range)

        def draw(leaf: jax.ShapeDtypeStruct) -> Float[Array, "embed 1"]:
            make = jax.jit(
                lambda key: normal(key, leaf.shape, leaf.dtype),
                out_shardings=leaf.sharding,
            )
            return make(jax.random.key(self.seed))

        return jax.tree.map(draw, like)


def _parts(params: PyTree) -> dict[str, Any]:
    """Returns the parameters of a decoder by module."""
    return dict(params.raw_mapping)


def start_origin(origin: Any, *, scored: bool, mesh: Mesh, seed: int) -> Any:
    """Returns the origin of the weights that a run starts from.

    Args:
      origin: Model.
      scored: Whether a reward model is trained.
      mesh: Device mesh.
      seed: Seed of the score head.
    """
    return WithScoreHead(origin, mesh, seed) if scored else origin
