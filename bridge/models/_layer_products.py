"""Products of the layers of a decoder: the first and last ones may be plain."""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import jax
from flax import nnx

from bridge.models._compressed_attention import CompressedAttention
from bridge.models._float8 import Product, plain_product
from bridge.models._float8_grouped import GroupedProduct
from bridge.models._grouped import grouped_matmul
from bridge.models._linear import Linear
from bridge.models._mlp import MLP
from bridge.models._moe import Experts
from bridge.models._self_attention import SelfAttention

Layer = TypeVar("Layer", bound=nnx.Module)


class LayerProducts(NamedTuple):
    """Products of a layer.

    Attributes:
      linear: Product of the projections of attention and MLPs.
      experts: Grouped product of experts.
    """

    linear: Product = plain_product
    experts: GroupedProduct = grouped_matmul


PLAIN = LayerProducts()
"""Products in the dtype of the weights."""


def products_of_layers(
    layers: int,
    products: LayerProducts,
    num_layers_at_start_in_bf16: int,
    num_layers_at_end_in_bf16: int,
) -> tuple[LayerProducts, ...]:
    """Returns the products of each layer: plain in the first and last ones.

    Args:
      layers: Number of layers.
      products: Products of the others.
      num_layers_at_start_in_bf16: Number of first layers with plain products.
      num_layers_at_end_in_bf16: Number of last layers with them.

    Raises:
      ValueError: If there are not as many layers, or all have plain products anyway.
    """
    start, end = num_layers_at_start_in_bf16, num_layers_at_end_in_bf16
    given = f"num_layers_at_start_in_bf16={start}, num_layers_at_end_in_bf16={end}"
    if start < 0 or end < 0 or start + end > layers:
        raise ValueError(
            f"{given}: each is at least 0, and together they are at most the {layers} "
            "layers of this decoder."
        )
    if (start or end) and products == PLAIN:
        raise ValueError(
            f"{given}: without a product of another precision all {layers} layers "
            "multiply in the dtype of the weights. Set product=float8_product, or "
            "leave both at 0."
        )
    middle = layers - start - end
    return (PLAIN,) * start + (products,) * middle + (PLAIN,) * end


def with_products(layer: Layer, products: LayerProducts) -> Layer:
    """Returns the layer with other products.

    Args:
      layer: Layer, which stays as it is.
      products: Products of projections and experts.
    """
    copy = jax.tree.map(lambda leaf: leaf, layer)
    set_products(copy, products)
    return copy


def set_products(layer: nnx.Module, products: LayerProducts) -> None:
    """Sets the products of a layer.

    Args:
      layer: Layer, which is changed.
      products: Products of projections and experts.
    """
    for linear in _projections(layer):
        linear.product = products.linear
    for _, module in nnx.iter_modules(layer):
        if isinstance(module, Experts):
            module.product = products.experts


def _projections(layer: nnx.Module) -> Iterator[Linear]:
    """Yields the linear modules of attention and MLPs, shared experts' too.

    Routers are none of them: their choices flip on small differences.
    """
    for _, module in nnx.iter_modules(layer):
        if isinstance(module, SelfAttention | CompressedAttention | MLP):
            yield from (one for one in vars(module).values() if isinstance(one, Linear))
