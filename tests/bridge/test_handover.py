"""Weights reach a rollout engine by their HF names, all right, or it is said."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_helpers import HF_CONFIG, like_of, load_model, logits_of
from flax import nnx
from helpers.errors import facts
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import numpy as reference

import bridge
from bridge.handover import named_tensors, receive_weights, send_weights

CONFIG = bridge.from_hf_config(HF_CONFIG)
RECEIVER = Path(bridge.handover.__path__[0]) / "receiver.py"
WORKER = Path(__file__).parent / "rollout_worker.py"
# Two float32 programs that sum in different orders, as in test_logits.py.
RELATIVE = 2e-5


@pytest.fixture(scope="module")
def params(llama) -> Any:
    """Weights of a Llama that were trained a little, over 8 devices."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(leaf):
        dims = [dim for dim, size in enumerate(leaf.shape) if size % 8 == 0]
        spec = PartitionSpec(
            *("x" if dim == dims[-1] else None for dim in range(leaf.ndim))
        )
        return jax.device_put(leaf * 1.25, NamedSharding(mesh, spec))

    return jax.tree.map(place, bridge.load_hf(llama, like_of(CONFIG)))


def test_tensors_have_the_names_and_bytes_of_a_saved_model(params, tmp_path):
    bridge.save_hf(tmp_path / "out", params, CONFIG)
    stored = reference.load_file(tmp_path / "out" / "model.safetensors")
    found = dict(named_tensors(params, CONFIG))
    assert found.keys() == stored.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, stored[name])
    half = dict(named_tensors(params, CONFIG, dtype=jnp.bfloat16))
    assert {tensor.dtype for tensor in half.values()} == {jnp.dtype("bfloat16")}


def test_a_tree_that_does_not_fit_is_refused_before_a_tensor(params):
    broken = {name: leaf for name, leaf in params.items() if name != "norm"}
    with pytest.raises(ValueError, match=facts("norm.scale")):
        named_tensors(broken, CONFIG)


def test_checksums_are_those_of_sha256sum(params, tmp_path):
    bridge.save_hf(tmp_path / "out", params, CONFIG, checksums=True)
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    subprocess.run(check, cwd=tmp_path / "out", check=True)
    listed = (tmp_path / "out" / "SHA256SUMS").read_text().split()[1::2]
    files = {file.name for file in (tmp_path / "out").iterdir()} - {"SHA256SUMS"}
    assert set(listed) == files
    with (tmp_path / "out" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    done = subprocess.run(check, cwd=tmp_path / "out", capture_output=True)
    assert done.returncode == 1


@pytest.mark.torch
def test_another_process_has_the_logits_of_the_new_weights(params, llama, tmp_path):
    bridge.save_hf(tmp_path / "model", params, CONFIG)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12))
    np.save(tmp_path / "tokens.npy", tokens)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        files = [tmp_path / name for name in ("model", "tokens.npy", "logits.npy")]
        argv = [RECEIVER, server.getsockname()[1], *files]
        worker = subprocess.Popen(
            [sys.executable, WORKER, *map(str, argv)],
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )
        connection, _ = server.accept()
        with connection:
            sent = send_weights(connection, params, CONFIG, metadata={"step": 7})
    assert worker.wait(120) == 0
    assert sent is not None and sent.bytes == 4 * sum(
        leaf.size for leaf in jax.tree.leaves(params)
    )
    model = load_model(llama)
    old = logits_of(model, tokens)
    nnx.update(model, params)
    wanted = logits_of(model, tokens)
    scale = np.abs(wanted).max()
    for found in np.load(tmp_path / "logits.npy"):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=RELATIVE * scale)
    assert np.abs(old - wanted).max() > 0.01 * scale  # So the new weights matter.


@contextlib.contextmanager
def connected(other: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    """One end of a connection, whose other end a thread has."""
    here, there = socket.socketpair()
    here.settimeout(30)
    there.settimeout(30)

    def run() -> None:
        with there, contextlib.suppress(OSError):
            other(there)

    thread = threading.Thread(target=run)
    thread.start()
    with here:
        yield here
    thread.join(30)


def skip_all(connection: socket.socket) -> bytes:
    """Reads a stream without checking it, up to where a confirmation is due."""
    size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
    header = json.loads(connection.recv(size, socket.MSG_WAITALL))
    for _, kind, shape in header["tensors"]:
        assert kind == "F32"
        rest = 4 * int(np.prod(shape)) + 32
        while rest:
            rest -= len(connection.recv(min(rest, 1 << 16)))
    return b""


def test_a_sender_is_told_of_a_receiver_that_has_gone_or_has_other_bytes(params):
    with connected(lambda c: c.close()) as here:
        with pytest.raises(OSError):
            send_weights(here, params, CONFIG)
    with connected(lambda c: c.send(skip_all(c))) as here:
        with pytest.raises(ConnectionError, match=facts(32)):
            send_weights(here, params, CONFIG)

    def confirm_other(connection: socket.socket) -> None:
        skip_all(connection)
        connection.sendall(bytes(32))

    with connected(confirm_other) as here:
        with pytest.raises(ValueError, match=facts("00" * 32)):
            send_weights(here, params, CONFIG)


def header(**fields: Any) -> bytes:
    given = {"format": "bridge-weights-1", "metadata": {}, "tensors": []} | fields
    text = json.dumps(given).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "stream, told",
    [
        (b"GET / HTTP/1.1\r\n\r\n", str(int.from_bytes(b"GET / HT", "little"))),
        (header(format="other"), "'other'"),
        (header(tensors=[["w", "F4", [2]]]), "F4"),
        (header(tensors=[["w", "F32", [-2]]]), "bridge-weights-1"),
        (header(tensors=[["w", "F32", ["2"]]]), "bridge-weights-1"),
        (header(tensors=7), "bridge-weights-1"),
        ((9).to_bytes(8, "little") + b"no json !", "bridge-weights-1"),
    ],
)
def test_a_stream_of_something_else_is_refused(stream, told):
    with connected(lambda c: c.sendall(stream)) as here:
        with pytest.raises(ValueError, match=facts(told)):
            receive_weights(here)


@pytest.mark.torch
def test_a_tensor_that_was_changed_or_cut_on_the_way_is_named(params):
    here, there = socket.socketpair()
    with here, there:
        data = bytes(range(8))
        tensors = [["good", "I8", [4]], ["bad", "I8", [4]]]
        good = data[:4] + hashlib.sha256(data[:4]).digest()
        there.sendall(header(tensors=tensors) + good + data[4:] + bytes(32))
        received = iter(receive_weights(here))
        name, tensor = next(received)
        assert (name, tensor.tolist()) == ("good", [0, 1, 2, 3])
        with pytest.raises(ValueError, match=facts("'bad'", 4)):
            next(received)
    with connected(lambda c: c.sendall(header(tensors=tensors) + data[:3])) as here:
        with pytest.raises(ConnectionError, match=facts("good", 1)):
            dict(receive_weights(here))
