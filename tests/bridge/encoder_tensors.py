"""What each parameter of the golden encoders holds."""

import math
import zlib

import numpy as np


def value_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers that are the same on every machine, and others for each name."""
    first = zlib.crc32(name.encode()) % 1009
    return (first + np.arange(math.prod(shape), dtype=np.float32)).reshape(shape)
