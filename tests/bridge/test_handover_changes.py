"""What changed since the last hand-over reaches an engine exactly, or is refused."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_helpers import like_of
from helpers.errors import facts
from jax.sharding import NamedSharding, PartitionSpec
from tiny_configs import hf_fields

import bridge
from bridge.handover import (
    changed_weights,
    named_tensors,
    receive_changes,
    send_changes,
    snapshot_weights,
)
from bridge.handover._checksum import bits_of, checksum
from bridge.handover._send_changes import ranges_of

# Transposed, fused and interleaved tensors; experts; layers of several kinds.
VARIANTS = [
    pytest.param("llama", None),
    pytest.param("gpt2", jnp.bfloat16),
    pytest.param("gpt_neox", None),
    pytest.param("mixtral", jnp.bfloat16),
    pytest.param("phi3", None, marks=pytest.mark.long),
    pytest.param("qwen3_next", None, marks=pytest.mark.long),
    pytest.param("deepseek_v3", jnp.bfloat16, marks=pytest.mark.long),
]
CONFIG = bridge.from_hf_config(hf_fields("llama"))


def shardings() -> dict[str, Callable[[tuple[int, ...]], NamedSharding]]:
    """Over 8 devices: last dims split, two dims split beside replicas, replicated."""
    one = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    auto = (jax.sharding.AxisType.Auto,) * 3
    three = jax.make_mesh((2, 2, 2), ("r", "x", "y"), axis_types=auto)

    def split(mesh, sizes: dict[str, int], shape: tuple[int, ...]) -> NamedSharding:
        spec: list[Any] = [None] * len(shape)
        for axis, size in sizes.items():
            free = [d for d, n in enumerate(shape) if n % size == 0 and spec[d] is None]
            if free:
                spec[free[-1]] = axis
        return NamedSharding(mesh, PartitionSpec(*spec))

    return {
        "split": lambda shape: split(one, {"x": 8}, shape),
        "replicas": lambda shape: split(three, {"x": 2, "y": 2}, shape),
        "replicated": lambda shape: split(one, {}, shape),
    }


def weights_of(config: Any, place: Any, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)

    def make(leaf):
        values = random.normal(size=leaf.shape).astype(np.float32)
        return jax.device_put(values, place(leaf.shape))

    return jax.tree.map(make, like_of(config))


def step(params: Any, fraction: float = 0.02, seed: int = 1) -> Any:
    """Other values of a few elements of most leaves."""
    random = np.random.default_rng(seed)

    def move(leaf):
        moved = random.random(leaf.shape) < fraction
        values = np.where(moved, np.asarray(leaf) * 1.5, np.asarray(leaf))
        return jax.device_put(values, leaf.sharding)

    return jax.tree.map(move, params)


def tensors_of(params: Any, config: Any, dtype: Any = None) -> dict[str, np.ndarray]:
    return {n: x.copy() for n, x in named_tensors(params, config, dtype=dtype)}


@pytest.mark.parametrize("variant, dtype", VARIANTS)
def test_changes_are_what_a_comparison_of_gathered_tensors_finds(variant, dtype):
    config = bridge.from_hf_config(hf_fields(variant))
    place = shardings()["split" if dtype is None else "replicas"]
    params = weights_of(config, place)
    old, after = tensors_of(params, config, dtype), step(params)
    new = tensors_of(after, config, dtype)
    changes, _ = changed_weights(snapshot_weights(params, config, dtype=dtype), after)
    found = {change.name: change for change in changes}
    assert found
    for name, tensor in new.items():
        where = np.flatnonzero(bits_of(tensor).ravel() != bits_of(old[name]).ravel())
        assert (name in found) == bool(len(where)), name
        if name in found:
            np.testing.assert_array_equal(found[name].positions, where)
            values = bits_of(found[name].values)
            np.testing.assert_array_equal(values, bits_of(tensor).ravel()[where])
            assert found[name].before == of_array(old[name])
            assert found[name].after == of_array(tensor)


def of_array(tensor: np.ndarray) -> int:
    return checksum(np.arange(tensor.size), bits_of(tensor).ravel())


def test_checksums_do_not_depend_on_the_sharding():
    found = [
        snapshot_weights(weights_of(CONFIG, place), CONFIG).checksums
        for place in shardings().values()
    ]
    assert found[0] == found[1] == found[2]
    tensors = tensors_of(weights_of(CONFIG, shardings()["split"]), CONFIG)
    assert found[0] == {name: of_array(tensor) for name, tensor in tensors.items()}


def test_a_checksum_tells_exchanged_and_negated_elements():
    values = np.array([0.0, 1.0, 2.0], np.float32)
    others = [values[[1, 0, 2]], -values, values[:2]]
    assert len({of_array(np.ascontiguousarray(x)) for x in (values, *others)}) == 4


def test_bits_and_not_values_are_compared():
    place = shardings()["split"]

    def full_of(value: float) -> Any:
        def make(leaf):
            values = np.full(leaf.shape, value, np.float32)
            return jax.device_put(values, place(leaf.shape))

        return jax.tree.map(make, like_of(CONFIG))

    snapshot = snapshot_weights(full_of(0.0), CONFIG)
    changes, _ = changed_weights(snapshot, full_of(-0.0))
    assert len(changes) == len(snapshot.entries)
    assert all(len(change.positions) == np.prod(change.shape) for change in changes)


def test_weights_that_are_sharded_otherwise_are_refused():
    places = shardings()
    snapshot = snapshot_weights(weights_of(CONFIG, places["split"]), CONFIG)
    other = weights_of(CONFIG, places["replicas"])
    with pytest.raises(
        ValueError, match=facts("layers.mlp.gate_proj.kernel", "send_weights")
    ):
        changed_weights(snapshot, other)


@pytest.mark.parametrize(
    "positions, ranges",
    [
        ([0], [[0, 1]]),
        ([0, 1, 2, 5], [[0, 3], [2, 1]]),
        ([7, 9], [[7, 1], [1, 1]]),
        ([1 << 33], [[(1 << 32) - 1, 0], [(1 << 32) - 1, 0], [2, 1]]),
    ],
)
def test_ranges_cover_the_positions(positions, ranges):
    assert ranges_of(np.array(positions)).tolist() == ranges


@contextlib.contextmanager
def engine(weights: dict[str, Any], *, wrong: list[ValueError]) -> Iterator[Any]:
    """A connection to an engine that applies what comes to its weights."""
    here, there = socket.socketpair()
    here.settimeout(30)
    there.settimeout(30)

    def run() -> None:
        with there:
            try:
                receive_changes(there).apply(weights)
            except ValueError as error:
                wrong.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    with here:
        yield here
    thread.join(30)


def as_torch(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    import torch

    found = {}
    for name, tensor in tensors.items():
        bits = torch.from_numpy(tensor.view(f"i{tensor.itemsize}").copy())
        kind = torch.bfloat16 if tensor.itemsize == 2 else torch.float32
        found[name] = bits.view(kind)
    return found


def same(weights: dict[str, Any], tensors: dict[str, np.ndarray]) -> bool:
    import torch

    wanted = as_torch(tensors)
    return all(
        torch.equal(x.contiguous().view(torch.uint8), wanted[n].view(torch.uint8))
        for n, x in weights.items()
    )


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_an_engine_has_the_weights_exactly_after_each_of_several_syncs(dtype):
    params = weights_of(CONFIG, shardings()["split"])
    weights = as_torch(tensors_of(params, CONFIG, dtype))
    # As engines may store it: the checksum is that of the elements in order.
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].t().contiguous().t()
    snapshot, wrong = snapshot_weights(params, CONFIG, dtype=dtype), []
    for number in range(3):
        params = step(params, fraction=[0.02, 0.3, 0][number], seed=number)
        changes, newer = changed_weights(snapshot, params)
        with engine(weights, wrong=wrong) as connection:
            sent = send_changes(connection, changes, metadata={"step": number})
        assert not wrong and same(weights, tensors_of(params, CONFIG, dtype))
        assert sent.tensors == len(changes) and (number < 2) == bool(changes)
        snapshot = newer


@pytest.mark.torch
def test_changes_of_other_weights_are_refused_and_nothing_is_changed():
    params = weights_of(CONFIG, shardings()["split"])
    tensors = tensors_of(params, CONFIG)
    changes, _ = changed_weights(snapshot_weights(params, CONFIG), step(params))
    name = "model.norm.weight"
    for break_one, told in (
        (
            lambda w: w[name].view(-1)[3].mul_(2),
            [name, f"{of_array(tensors[name]):016x}"],
        ),
        (lambda w: w.pop(name), [name]),
        (lambda w: w.update({name: w[name].double()}), [name, "torch.float64"]),
    ):
        weights, wrong = as_torch(tensors), []
        break_one(weights)
        before = {n: x.clone() for n, x in weights.items()}
        with engine(weights, wrong=wrong) as connection:
            with pytest.raises(ValueError, match=facts(len(changes), "send_weights")):
                send_changes(connection, changes)
        assert all(part in str(wrong[0]) for part in told)
        assert all(bool((x == before[n]).all()) for n, x in weights.items())


@pytest.mark.torch
def test_changes_that_were_altered_on_the_way_are_named():
    params = weights_of(CONFIG, shardings()["split"])
    changes, _ = changed_weights(snapshot_weights(params, CONFIG), step(params))
    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(
            target=_ends, args=(lambda: send_changes(there, changes[:1]),)
        )
        sender.start()
        middle, far = socket.socketpair()
        with middle, far:
            size = int.from_bytes(data := here.recv(8, socket.MSG_WAITALL), "little")
            text = here.recv(size, socket.MSG_WAITALL)
            payload = 4 * len(changes[0].values)
            payload += 8 * len(ranges_of(changes[0].positions)) + 32
            body = bytearray(here.recv(payload, socket.MSG_WAITALL))
            body[-33] ^= 1
            middle.sendall(data + text + body)
            with pytest.raises(ValueError, match=facts(f"'{changes[0].name}'")):
                receive_changes(far)
        here.close()
        sender.join(30)


def _ends(call: Callable[[], Any]) -> None:
    with contextlib.suppress(OSError):
        call()
