"""Flash attention as a Pallas kernel for GPUs: softcaps, windows, packed rows, MLA."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from bridge.models._flash_bodies import (
    Operands,
    Stats,
    forward_body,
    key_grads_body,
    query_grad_body,
)
from bridge.models._kernel_mask import (
    UNSEEN,
    Mask,
    Ranges,
    Scores,
    block_ranges,
    pad_tokens,
)

# Names of the kernels in compiled programs. `fsdp_jax.planner` reads them there by
# constants of its own, which must be equal: a test compares them.
FORWARD = "flash_attention_forward"
QUERY_GRAD = "flash_attention_query_grad"
KEY_GRADS = "flash_attention_key_grads"

_PARAMS = {"num_stages": 2, "num_warps": 8}


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Tokens per block, powers of two of at least 16.

    Attributes:
      forward: Queries and keys of the forward pass.
      backward: Queries and keys of the backward pass.
    """

    forward: tuple[int, int]
    backward: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class FlashKernel:
    """Blockwise attention that never stores scores.

    Blocks of keys that no query of a block sees are not visited: those after it, out of
    its window, or of other segments.

    Attributes:
      blocks: Tokens per block; None for those of the head dim.
      interpret: Whether to interpret the kernel, on any device.

    Source: Dao, FlashAttention-2, arXiv:2307.08691.
    """

    blocks: Blocks | None = None
    interpret: bool = False

    def forward(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch keys kv_heads head_dim"],
        value: Float[Array, "batch keys kv_heads v_head_dim"],
        scores: Scores,
        mask: Mask,
        window: Any = None,
    ) -> tuple[
        Float[Array, "batch seq heads v_head_dim"], Float[Array, "batch heads seq"]
    ]:
        """Computes the attention output and the log-sum-exp, as `AttentionKernel`."""
        seq, blocks = query.shape[1], self._blocks(query, value).forward
        call = _Call(scores, blocks, self.interpret)
        operands, _ = call.prepare(query, key, value, mask, window)
        out, log_sum = call.forward(operands)
        return out[:, :seq], log_sum[:, :, :seq]

    def backward(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch keys kv_heads head_dim"],
        value: Float[Array, "batch keys kv_heads v_head_dim"],
        out: Float[Array, "batch seq heads v_head_dim"],
        log_sum: Float[Array, "batch heads seq"],
        grad: Float[Array, "batch seq heads v_head_dim"],
        scores: Scores,
        mask: Mask,
        window: Any = None,
    ) -> tuple[Array, Array, Array]:
        """Computes the gradients of its inputs, as `AttentionKernel`."""
        seq, num_keys = query.shape[1], key.shape[1]
        call = _Call(scores, self._blocks(query, value).backward, self.interpret)
        delta = jnp.einsum("bqhd,bqhd->bhq", *(_wide(x) for x in (out, grad)))
        operands, by_keys = call.prepare(query, key, value, mask, window)
        pad = ((0, 0), (0, 0), (0, -seq % call.blocks[0]))
        stats = Stats(jnp.pad(log_sum, pad), jnp.pad(delta, pad))
        grad = _pad(grad, call.blocks[0])
        d_query = call.query_grad(grad, stats, operands)
        d_key, d_value = call.key_grads(grad, stats, operands._replace(ranges=by_keys))
        return d_query[:, :seq], d_key[:, :num_keys], d_value[:, :num_keys]

    def _blocks(self, query: Array, value: Array) -> Blocks:
        if self.blocks is not None:
            return self.blocks
        width = max(query.shape[-1], value.shape[-1])
        # Accumulators in float32 and two stages of operands fit into 227 KiB.
        if width <= 128:
            return Blocks((128, 64), (64, 64))
        return Blocks((64, 32), (32, 32))


@dataclasses.dataclass(frozen=True)
class _Call:
    """Three kernels with the same operands.

    Attributes:
      scores: Static parameters of the scores.
      blocks: Queries and keys per block.
      interpret: Whether to interpret them.
    """

    scores: Scores
    blocks: tuple[int, int]
    interpret: bool

    def prepare(
        self, query: Array, key: Array, value: Array, mask: Mask, window: Any
    ) -> tuple[Operands, Ranges]:
        """Pads all to full blocks, and finds the blocks that meet.

        Returns:
          Operands, with the blocks of keys that each block of queries visits, and the
          blocks of queries that each block of keys visits.
        """
        own, other = self.blocks
        queries = pad_tokens(mask.queries, own, -1)
        keys = pad_tokens(mask.keys, other, UNSEEN)
        window = None if window is None else jnp.asarray(window, jnp.int32)
        by_queries, by_keys = block_ranges(queries, keys, window, own, other)
        operands = Operands(
            _pad(query, own),
            _pad(key, other),
            _pad(value, other),
            queries,
            keys,
            None if window is None else window.reshape(1),
            by_queries,
        )
        return operands, by_keys

    def forward(self, operands: Operands) -> Any:
        """Returns the output and the log-sum-exp."""
        query, value = operands.query, operands.value
        batch, seq, heads, _ = query.shape
        widths = (query.shape[-1], value.shape[-1])
        shapes = (
            jax.ShapeDtypeStruct((batch, seq, heads, value.shape[-1]), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, seq), jnp.float32),
        )
        own = self.blocks[0]
        return self._call(
            functools.partial(forward_body, self.scores, widths, self.blocks[1]),
            (seq // own, batch, heads),
            (operands,),
            (self._by_queries(operands),),
            shapes,
            (_one_head(own, value), _stats_of_one_head(own)),
            FORWARD,
        )

    def query_grad(self, grad: Array, stats: Stats, operands: Operands) -> Any:
        """Returns the gradient of the queries."""
        query = operands.query
        batch, seq, heads, _ = query.shape
        widths = (query.shape[-1], grad.shape[-1])
        own = self.blocks[0]
        stat = _stats_of_one_head(own)
        return self._call(
            functools.partial(query_grad_body, self.scores, widths, self.blocks[1]),
            (seq // own, batch, heads),
            (grad, stats, operands),
            (_one_head(own, grad), Stats(stat, stat), self._by_queries(operands)),
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            _one_head(own, query),
            QUERY_GRAD,
        )

    def key_grads(self, grad: Array, stats: Stats, operands: Operands) -> Any:
        """Returns the gradients of keys and values; `ranges` are those of keys."""
        query, key, value, queries, keys, window, ranges = operands
        batch, num_keys, kv_heads, _ = key.shape
        seq, group, other = query.shape[1], query.shape[2] // kv_heads, self.blocks[1]
        widths = (key.shape[-1], value.shape[-1])
        query_spec, grad_spec = (
            pl.BlockSpec((None, seq, group, _width(x)), lambda j, b, h: (b, 0, h, 0))
            for x in (query, grad)
        )
        stat = pl.BlockSpec((None, group, seq), lambda j, b, h: (b, h, 0))
        key_spec, value_spec = (_one_head(other, x) for x in (key, value))
        specs = Operands(
            query_spec,
            key_spec,
            value_spec,
            jax.tree.map(lambda x: _row(x.shape[1]), queries),
            jax.tree.map(lambda x: _one_block(other), keys),
            _scalar(window),
            _of_ranges(ranges),
        )
        return self._call(
            functools.partial(
                key_grads_body, self.scores, widths, self.blocks[0], group
            ),
            (num_keys // other, batch, kv_heads),
            (grad, stats, operands),
            (grad_spec, Stats(stat, stat), specs),
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (key, value)],
            [key_spec, value_spec],
            KEY_GRADS,
        )

    def _by_queries(self, operands: Operands) -> Operands:
        """Returns the specs of a block of queries, and of all keys that it may see."""
        query, key, value, queries, keys, window, ranges = operands
        group = query.shape[2] // key.shape[2]
        key_spec, value_spec = (
            pl.BlockSpec(
                (None, x.shape[1], None, _width(x)),
                lambda i, b, h: (b, 0, lax.div(h, group), 0),
            )
            for x in (key, value)
        )
        return Operands(
            _one_head(self.blocks[0], query),
            key_spec,
            value_spec,
            jax.tree.map(lambda x: _one_block(self.blocks[0]), queries),
            jax.tree.map(lambda x: _row(x.shape[1]), keys),
            _scalar(window),
            _of_ranges(ranges),
        )

    def _call(self, kernel, grid, given, in_specs, shapes, out_specs, name: str):
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=shapes,
            interpret=self.interpret,
            compiler_params=plgpu.CompilerParams(**_PARAMS),
            name=name,
        )(*given)


def _width(x: Array) -> int:
    """Returns the head dim of a block: Triton's are powers of two, of at least 16."""
    return max(16, pl.next_power_of_2(x.shape[-1]))


def _one_head(block: int, x: Array) -> pl.BlockSpec:
    """Returns the spec of a block of tokens of one head."""
    return pl.BlockSpec((None, block, None, _width(x)), lambda i, b, h: (b, i, h, 0))


def _stats_of_one_head(block: int) -> pl.BlockSpec:
    """Returns the spec of a block of tokens of one head, of `[batch, heads, seq]`."""
    return pl.BlockSpec((None, None, block), lambda i, b, h: (b, h, i))


def _one_block(block: int) -> pl.BlockSpec:
    """Returns the spec of a block of a `[batch, seq]` array."""
    return pl.BlockSpec((None, block), lambda i, b, h: (b, i))


def _row(length: int) -> pl.BlockSpec:
    """Returns the spec of a whole row of a `[batch, length]` array."""
    return pl.BlockSpec((None, length), lambda i, b, h: (b, 0))


def _of_ranges(ranges: Ranges) -> Ranges:
    return jax.tree.map(lambda x: _row(x.shape[1]), ranges)


def _scalar(window: Array | None) -> pl.BlockSpec | None:
    return None if window is None else pl.BlockSpec((1,), lambda i, b, h: (0,))


def _pad(x: Float[Array, "batch seq heads dim"], block: int) -> Array:
    """Pads a sequence with zeros to whole blocks."""
    missing = -x.shape[1] % block
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
