"""The tensors that were read last, kept for weights whose boxes are scattered."""

import collections
import threading
from concurrent.futures import Future

import numpy as np

from bridge._box import complete, shape_of, span, take
from bridge.formats._source import Source

_TENSORS = 8  # those of two weights


class Recent:
    """Source that reads a tensor once for several boxes that are scattered over it.

    A band of outputs of a weight that is stored inputs first is a few bytes of each
    row: without this, each band would read the entire tensor again.
    """

    def __init__(self, source: Source):
        """Keeps nothing yet.

        Args:
          source: Source to read.
        """
        self._source = source
        self._kept: collections.OrderedDict[str, Future[np.ndarray]]
        self._kept = collections.OrderedDict()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        return self._source.name

    def keys(self) -> tuple[str, ...]:
        """Returns the names of all tensors."""
        return self._source.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self._source.shape(key)

    def dtype(self, key: str) -> np.dtype:
        """Returns the stored dtype of a tensor."""
        return self._source.dtype(key)

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a box: alone if it is one range of the file, else all of the tensor."""
        box = complete(slices, self.shape(key))
        run = span(box, self.shape(key))
        if run.stop - run.start == np.prod(shape_of(box)):
            return self._source.read(key, slices)
        with self._lock:
            reads = key not in self._kept
            kept = self._kept.setdefault(key, Future())
            self._kept.move_to_end(key)
            if len(self._kept) > _TENSORS:
                self._kept.popitem(last=False)
        if reads:
            self._fill(key, kept)
        return take(kept.result(), box)

    def _fill(self, key: str, kept: Future[np.ndarray]) -> None:
        try:
            kept.set_result(self._source.read(key))
        except BaseException as error:
            kept.set_exception(error)
            with self._lock:
                self._kept.pop(key, None)
            raise
