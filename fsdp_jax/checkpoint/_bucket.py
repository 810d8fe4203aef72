"""Buckets of object stores, which TensorStore reads and writes.

TensorStore, which writes the arrays, speaks the protocols of Google Cloud Storage and
S3, finds the credentials where the tools of both look for them, and repeats a request
that fails. Other files of a step take the same way, so that no other library is needed.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import tensorstore as ts

SCHEMES = ("gs", "s3")
# A request that fails, or gets a 429 or 5xx, is repeated after 0.5 s, 1 s, 2 s ... of
# at most 20 s with a random part, for about 3 minutes in all.
_MAX_RETRIES = 12
_FIRST_DELAY, _LONGEST_DELAY = "500ms", "20s"
# Time for a request with its retries; a hung connection has no other limit.
TIMEOUT_SECS = 600.0
# Of a message of TensorStore, which may quote what it read.
_LONGEST_TEXT = 400
# TensorStore's codes of requests that were refused, or failed again and again.
_OUTAGES = (
    "ABORTED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
)


class ObjectStoreError(OSError):
    """An object store refused a request, or did not answer in time."""


def kvstore_spec(scheme: str, bucket: str, path: str) -> dict[str, Any]:
    """Returns TensorStore's spec of the keys that begin with `path`.

    Args:
      scheme: `"gs"` or `"s3"`.
      bucket: Name of the bucket.
      path: Prefix of the keys; of a folder it ends with a slash.
    """
    retries = {
        "max_retries": _MAX_RETRIES,
        "initial_delay": _FIRST_DELAY,
        "max_delay": _LONGEST_DELAY,
    }
    place = {"bucket": bucket, "path": path}
    if scheme == "gs":
        return {"driver": "gcs", **place, "gcs_request_retries": retries}
    return {
        "driver": "s3",
        **place,
        **_endpoint(),
        **_credentials(),
        "s3_request_retries": retries,
        # Else not with an endpoint of one's own; the lease of a directory needs it.
        "use_conditional_write": True,
    }


def open_bucket(scheme: str, bucket: str) -> ts.KvStore:
    """Opens a bucket; the same object for equal settings."""
    return _open(json.dumps(kvstore_spec(scheme, bucket, "")))


def wait(future: ts.Future, what: str) -> Any:
    """Returns the result of a request.

    Args:
      future: Request under way.
      what: URL that it is about, for messages.

    Raises:
      ObjectStoreError: If it failed, or is not answered in time.
    """
    try:
        return future.result(timeout=TIMEOUT_SECS)
    except TimeoutError as error:
        raise ObjectStoreError(
            f"'{what}': no answer within {TIMEOUT_SECS:g} s."
        ) from error
    except Exception as error:  # TensorStore raises plain `Exception`s.
        raise outage(what, error) from error


def outage(what: object, error: BaseException) -> ObjectStoreError:
    """Returns the error of a request that failed, from TensorStore's."""
    text = str(error).partition(" [tensorstore_spec")[0]
    return ObjectStoreError(f"'{what}': {text:.{_LONGEST_TEXT}}")


def is_outage(error: BaseException) -> bool:
    """Returns whether a store gave no answer, which says nothing of what it holds."""
    codes = any(code in str(error) for code in _OUTAGES)
    return codes or isinstance(error, TimeoutError)


@functools.cache
def _open(spec: str) -> ts.KvStore:
    return ts.KvStore.open(json.loads(spec)).result()


def _endpoint() -> dict[str, str]:
    """Returns the server of an S3-compatible store, by AWS's own variables."""
    variables = os.environ
    url = variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL")
    if not url:
        return {}
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION")
    return {"endpoint": url, "aws_region": region or "us-east-1"}


def _credentials() -> dict[str, Any]:
    """Returns that keys in the environment are taken; AWS asks for these first too.

    TensorStore's own choice prints an error for each other place without credentials.
    """
    is_set = "AWS_ACCESS_KEY_ID" in os.environ
    return {"aws_credentials": {"type": "environment"}} if is_set else {}
