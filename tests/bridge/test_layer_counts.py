"""Counts of layers that no model has are refused before anything is as long."""

import tracemalloc
from collections.abc import Callable

import pytest
from helpers.errors import facts
from tiny_configs import FAMILIES, hf_fields

import bridge
from bridge.models import DecoderConfig

COUNT = 10**6
NAMES = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def refuse(make: Callable[[], object]) -> int:
    """Returns the peak of bytes until the count is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=facts(f"{COUNT:,}", "1,000")):
            make()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_file_with_a_million_layers_is_refused_at_once(variant):
    fields = hf_fields(variant)
    counts = {name: COUNT for name in NAMES if name in fields}
    assert counts
    assert refuse(lambda: bridge.from_hf_config(fields | counts)) < COUNT


def test_a_config_with_a_million_layers_is_refused_at_once():
    def make() -> DecoderConfig:
        return DecoderConfig(64, 16, 32, num_hidden_layers=COUNT, num_attention_heads=2)

    assert refuse(make) < COUNT
