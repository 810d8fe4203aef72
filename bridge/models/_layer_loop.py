"""Loops over the layers of a decoder: a scan over the periods of each block."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bridge.models._batch_parts import BatchParts, join_carry, split_carry
from bridge.models._causal_conv import Mask
from bridge.models._config import DecoderConfig
from bridge.models._decoder_layer import DecoderLayer
from bridge.models._hyper_connections import Streams
from bridge.models._indexed_attention import SelectedStream, select_all
from bridge.models._layer_inputs import per_layer
from bridge.models._layer_kinds import LayerStack
from bridge.models._layer_mixer import Stream
from bridge.models._layer_output import Experts, PerLayer
from bridge.models._layer_products import LayerProducts, with_products
from bridge.models._layer_state import IndexedKeyValues, KeyValues, LayerState
from bridge.models._position_tables import PositionTables
from bridge.models._positions import Ids
from bridge.models._router_stats import RouterStats
from bridge.models._shared_attention import SharedStream, share_nothing
from bridge.models._shared_block import SharedBlock, SharedBlocks

Scan = Callable[..., tuple[Any, Any]]
Carry = Stream | Streams | SelectedStream | SharedStream | BatchParts
Unit = Callable[..., tuple[Carry, Any]]


def plain_scan(
    unit: Callable[..., tuple[Any, Any]],
    stacked: Any,
    carry: Any,
    xs: tuple[Any, ...] = (),
    consts: tuple[Any, ...] = (),
    *,
    static: Sequence[Hashable] | None = None,
) -> tuple[Any, Any]:
    """Runs `unit` over stacked weights, one layer at a time.

    Default of the decoder's `scan` argument, and the required signature of any
    replacement: everything differentiable is passed as an argument.

    Args:
      unit: Function `unit(weights, carry, *x_slices, *consts) -> (carry, y)`.
      stacked: Pytree of weights with a leading layer dim.
      carry: Carry of the first unit.
      xs: Pytrees with a leading layer dim, sliced for each unit.
      consts: Pytrees that every unit receives without slicing.
      static: Value of each unit that is known when it is traced, its argument `static`;
        one loop for each run of equal values. None for units without that argument.

    Returns:
      Final carry, and the stacked `y`s.
    """
    if static is not None:
        return _scan_runs(unit, stacked, carry, xs, consts, static)

    def body(carry, slices):
        weights, x_slices = slices
        return unit(weights, carry, *x_slices, *consts)

    return jax.lax.scan(body, carry, (stacked, xs))


def _scan_runs(
    unit: Callable[..., tuple[Any, Any]],
    stacked: Any,
    carry: Any,
    xs: tuple[Any, ...],
    consts: tuple[Any, ...],
    static: Sequence[Hashable],
) -> tuple[Any, Any]:
    """Runs a loop for each run of units with the same static value."""
    start, ys = 0, []
    for value, equal in groupby(static):
        stop = start + len(list(equal))
        part, x = jax.tree.map(lambda a, s=slice(start, stop): a[s], (stacked, xs))
        carry, y = plain_scan(partial(unit, static=value), part, carry, x, consts)
        start = stop
        ys.append(y)
    return carry, jax.tree.map(lambda *y: jnp.concatenate(y), *ys)


def run_layers(
    config: DecoderConfig,
    scan: Scan,
    unit: Unit,
    blocks: list[list[DecoderLayer]],
    x: Stream,
    consts: tuple[Any, ...],
    *,
    cache: Sequence[LayerState | None] | None = None,
    experts: Int[Array, "layers batch seq chosen"] | None = None,
    token_experts: Int[Array, "layers batch seq chosen"] | None = None,
    inputs_of_layers: Float[Array, "layers batch seq size"] | None = None,
    products: Sequence[LayerProducts] | None = None,
    shared_blocks: Sequence[SharedBlock] | None = None,
    batch_parts: int = 1,
) -> tuple[Stream, list[Any]]:
    """Runs all blocks of layers.

    Args:
      config: Config of the decoder.
      scan: Function with the signature of `plain_scan`.
      unit: Function `unit(layer, x, per_layer, *consts) -> (x, y)`, with the layer's
        cache after `per_layer` where there is one.
      blocks: Stacks of each block.
      x: Residual stream.
      consts: Trees that all layers receive.
      cache: Cache of each stack; None without one.
      experts: Experts of each token in each layer that has any; None if routers choose.
      token_experts: Experts that follow from the tokens, in each layer that hashes;
        None without such layers. `experts` are in place of them.
      inputs_of_layers: Input that each layer has of each token; None for none.
      products: Products of each layer; None for those that the layers have.
      shared_blocks: Blocks that several layers run; None for none.
      batch_parts: Parts of the rows that run side by side; 1 with a cache.

    Returns:
      Residual stream, and one `y` per stack, with a leading layer dim.
    """
    inputs, ys = per_layer(config), []
    stacks = iter(enumerate(config.layer_stacks))
    carry = split_carry(_first_carry(config, x, cache), len(x), batch_parts)
    for block in blocks:
        xs, own_products, own_consts = [], [], consts
        for _, (number, stack) in zip(block, stacks, strict=False):
            own: dict[str, Any] = {
                name: v[np.asarray(stack.layers)] for name, v in inputs.items()
            }
            if inputs_of_layers is not None:
                own["input"] = inputs_of_layers[np.asarray(stack.layers)]
            chosen = _experts_of_stack(config, stack, experts, token_experts)
            own |= {} if chosen is None else {"experts": chosen}
            if products is not None:
                own_products.append([products[i] for i in stack.layers])
            xs.append((own,) if cache is None else (own, cache[number]))
            if stack.kind.shared_block is not None:
                own_consts = (*consts, SharedBlocks(list(shared_blocks or ()), x))
        # As a period, whose units are not gathered ahead: this one has units within.
        single = len(block) == 1 and own_consts is consts
        if single:
            run, static = unit, own_products[0] if own_products else None
        else:
            run, static = _period(unit), list(zip(*own_products, strict=True)) or None
        given = {"xs": xs[0] if single else (xs,), "consts": own_consts}
        layers = block[0] if single else block
        if static is None:
            carry, y = scan(run, layers, carry, **given)
        else:
            run = _multiplied(run)
            carry, y = scan(run, layers, carry, **given, static=static)
        ys += [y] if single else y
    return _stream(carry), ys


def _experts_of_stack(
    config: DecoderConfig,
    stack: LayerStack,
    experts: Int[Array, "layers batch seq chosen"] | None,
    token_experts: Int[Array, "layers batch seq chosen"] | None,
) -> Int[Array, "layers batch seq chosen"] | None:
    """Returns the experts that the layers of a stack do not choose themselves."""
    if experts is not None and stack.kind.channels == "sparse":
        sparse = sparse_layers(config)
        return experts[np.asarray([sparse.index(i) for i in stack.layers])]
    if token_experts is not None and stack.kind.hashes:
        hashed = [config.hash_layers.index(i) for i in stack.layers]
        return token_experts[np.asarray(hashed)]
    return None


def _first_carry(
    config: DecoderConfig, x: Stream, cache: Sequence[LayerState | None] | None
) -> Carry:
    """Puts what layers share beside the stream: selected keys, or keys and values."""
    indexer, keys = config.indexer, x.shape[1]
    if config.kv_sharing is not None:
        if cache is not None and isinstance(cache[0], KeyValues):
            keys = cache[0].key.shape[2]
        return share_nothing(config, x, keys)
    if indexer is None or not config.shared_indexer_layers:
        return x
    if cache is not None and isinstance(cache[0], IndexedKeyValues):
        keys = cache[0].index_key.shape[2]
    return select_all(x, keys) if keys > indexer.num_selected else x


def _stream(x: Carry) -> Stream:
    x = join_carry(x)
    return x.stream if isinstance(x, SelectedStream | SharedStream) else x  # pyright: ignore[reportReturnType]


def sparse_layers(config: DecoderConfig) -> list[int]:
    """Returns the layers that have experts, in order."""
    return sorted(
        layer
        for stack in config.layer_stacks
        if stack.kind.channels == "sparse"
        for layer in stack.layers
    )


def in_layer_order(config: DecoderConfig, ys: list[Any]) -> Any:
    """Joins what stacks return, along their layer dim; None if none returns any.

    Args:
      config: Config of the decoder.
      ys: One tree per stack, or None.
    """
    found = [
        (stack.layers, y)
        for stack, y in zip(config.layer_stacks, ys, strict=True)
        if y is not None
    ]
    if not found:
        return None
    layers = [layer for each, _ in found for layer in each]
    joined = jax.tree.map(lambda *y: jnp.concatenate(y), *(y for _, y in found))
    if layers == sorted(layers):
        return joined
    return jax.tree.map(lambda y: y[np.argsort(layers)], joined)


def _period(unit: Unit) -> Unit:
    """Returns a unit that runs the layers of a period, one after the other."""

    def run(
        layers: list[DecoderLayer], x: Carry, xs: list[tuple[Any, ...]], *consts: Any
    ) -> tuple[Carry, list[Any]]:
        ys = []
        for layer, slices in zip(layers, xs, strict=True):
            x, y = unit(layer, x, *slices, *consts)
            ys.append(y)
        return x, ys

    return run


def _multiplied(unit: Unit) -> Unit:
    """Returns a unit whose `static` is the products of its layer, or of each."""

    def run(layers: Any, x: Carry, *args: Any, static: Any) -> tuple[Carry, Any]:
        if isinstance(layers, DecoderLayer):
            return unit(with_products(layers, static), x, *args)
        pairs = zip(layers, static, strict=True)
        return unit([with_products(*pair) for pair in pairs], x, *args)

    return run


def apply_layer(
    layer: DecoderLayer, x: Carry, per_layer: PerLayer, *consts: Any
) -> tuple[Carry, RouterStats | None]:
    """Runs a layer, and returns the statistics of its router."""
    # Through `__call__`, which a subclass may override to gather the weights.
    out = layer(x, per_layer, *consts)
    return out.stream, out.router_stats


def apply_and_route(
    layer: DecoderLayer, x: Carry, per_layer: PerLayer, *consts: Any
) -> tuple[Carry, Experts | None]:
    """Runs a layer, and returns the experts of each token."""
    out = layer(x, per_layer, *consts)
    return out.stream, out.experts


def apply_and_keep(
    layer: DecoderLayer, x: Carry, per_layer: PerLayer, *consts: Any
) -> tuple[Carry, Stream]:
    """Runs a layer, and returns the residual stream behind it."""
    x = layer(x, per_layer, *consts).stream
    return x, _stream(x)


def extend_layer(
    layer: DecoderLayer,
    x: Carry,
    per_layer: PerLayer,
    cache: LayerState | None,
    tables: PositionTables,
    slots: Ids,
    is_token: Mask,
    shared: SharedBlocks | None = None,
) -> tuple[Carry, LayerState | None]:
    """Runs new tokens through a layer, and returns its cache with them."""
    given = {"cache": cache, "slots": slots, "is_token": is_token}
    out = layer(x, per_layer, tables, None, shared, **given)
    return out.stream, out.cache
