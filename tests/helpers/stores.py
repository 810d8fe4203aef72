"""Object stores for tests: what `gs://` and `s3://` mean is a server on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from helpers.object_server import ObjectStore, serving

from fsdp_jax.checkpoint import _bucket


def variables(url: str) -> dict[str, str]:
    """Environment in which TensorStore finds the server at `url` for both schemes."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
    }


@contextlib.contextmanager
def found_by_tensorstore() -> Iterator[ObjectStore]:
    """Serves an empty store, which `gs://` and `s3://` mean meanwhile.

    TensorStore looks for the server of Google's store once in a process.
    """
    with serving() as (store, url), pytest.MonkeyPatch.context() as patch:
        for name, value in variables(url).items():
            patch.setenv(name, value)
        patch.setattr(_bucket, "_FIRST_DELAY", "10ms")
        patch.setattr(_bucket, "_LONGEST_DELAY", "50ms")
        yield store
