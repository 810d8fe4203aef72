"""Interpretation of torch's pickles: lazy tensors and plain values.

Source: pytorch torch/_utils.py::_rebuild_tensor_v2
"""

import dataclasses
import math
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from bridge._box import complete, shape_of
from bridge.formats._dtensor import LocalShard, local_shard
from bridge.formats._torch_dtypes import DTYPES, STORAGES
from bridge.formats._unpickle import PERSISTENT_ID, Rule, Stub, check_hashable
from bridge.formats._zip import StoredZip


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """Tensor of a torch file whose data is read on request.

    Args:
      archive: Archive that contains the storage.
      member: Name of the archive member that is the storage.
      shape: Shape of the tensor.
      dtype: Dtype of the tensor.
      offset: Position of the first element, in elements of the storage.
      strides: Stride of each dim, in elements.
      is_conjugate: Whether the elements are the conjugates of the stored ones.
      is_negative: Whether they are the negatives.
    """

    archive: StoredZip
    member: str
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    strides: tuple[int, ...]
    is_conjugate: bool = False
    is_negative: bool = False

    def read(self, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads the tensor, or the region selected by `slices`.

        Reads the one range that covers the box; strides then select the box.

        Raises:
          ValueError: If the bytes are damaged or missing, or a slice has a step.
        """
        box = complete(slices, self.shape)
        shape = shape_of(box)
        if 0 in shape:
            return np.empty(shape, self.dtype)
        strides = self.strides
        first = self.offset + sum(
            r.start * n for r, n in zip(box, strides, strict=True)
        )
        last = self.offset + sum(
            (r.stop - 1) * n for r, n in zip(box, strides, strict=True)
        )
        itemsize = self.dtype.itemsize
        data = self.archive.read(self.member, first * itemsize, (last + 1) * itemsize)
        byte_strides = tuple(n * itemsize for n in strides)
        array = np.ndarray(shape, self.dtype, data, strides=byte_strides)
        if self.is_conjugate:
            array = np.conj(array)
        # As an array, since numpy makes scalars of results without dims.
        return np.asarray(-array if self.is_negative else array)


def tensor_rules(archive: StoredZip, folder: str) -> dict[str, Rule]:
    """Returns the rules that interpret an archive's pickle, including its tensors.

    Args:
      archive: Archive that contains the tensors' storages.
      folder: Prefix of the member names, such as `"archive/"`.
    """
    return {**PLAIN_RULES, **_TensorRules(archive, folder).rules()}


def _as_dict(stub: Stub) -> dict[Any, Any]:
    pairs = stub.args[0] if stub.args and not isinstance(stub.args[0], Stub) else ()
    return {**_dict_of(pairs), **(stub.entries or {})}


def _dict_of(pairs: Any) -> dict[Any, Any]:
    if not isinstance(pairs, dict):  # whose keys have been checked
        for key, _ in pairs:
            check_hashable(key)
    return dict(pairs)


def _encode(stub: Stub) -> bytes:
    text, encoding = stub.args
    if encoding != "latin1":
        raise ValueError(f"bytes are encoded as {reprlib.repr(encoding)}, not latin1")
    return text.encode("latin1")


PLAIN_RULES: Mapping[str, Rule] = {
    "collections.OrderedDict": _as_dict,
    "collections.defaultdict": _as_dict,
    "argparse.Namespace": lambda stub: _dict_of(stub.state or {}),
    "types.SimpleNamespace": lambda stub: _dict_of(stub.state or {}),
    "torch.Size": lambda stub: tuple(*stub.args),
    "_codecs.encode": _encode,
    **{f"torch.{name}": lambda _, dtype=dtype: dtype for name, dtype in DTYPES.items()},
}
"""Rules for stubs other than tensors."""


# Tensor types without data beyond their elements.
_PLAIN_TYPES = {
    "torch.Tensor",
    "torch.nn.parameter.Buffer",
    "torch.nn.parameter.Parameter",
}


def _called(rule: Rule) -> Rule:
    """Restricts a rule to calls: a function that is only named stays a stub."""
    return lambda stub: rule(stub) if stub.args else stub


@dataclasses.dataclass(frozen=True)
class _Storage:
    member: str
    dtype: np.dtype
    nbytes: int


@dataclasses.dataclass(frozen=True)
class _TensorRules:
    archive: StoredZip
    folder: str

    def rules(self) -> dict[str, Rule]:
        utils = "torch._utils."
        functions: dict[str, Rule] = {
            f"{utils}_rebuild_tensor": self._tensor,
            f"{utils}_rebuild_tensor_v2": self._tensor,
            f"{utils}_rebuild_tensor_v3": lambda s: self._tensor(s, s.args[6], 7),
            f"{utils}_rebuild_parameter": lambda stub: stub.args[0],
            f"{utils}_rebuild_parameter_with_state": lambda stub: stub.args[0],
            "torch._tensor._rebuild_from_type_v2": self._typed,
        }
        return {
            PERSISTENT_ID: self._storage,
            **{name: _called(rule) for name, rule in functions.items()},
        }

    def _typed(self, stub: Stub) -> LazyTensor | LocalShard:
        """Rebuilds a tensor with attributes from its function and arguments."""
        function, of_type, args, state = stub.args
        if function.name == "torch._utils._rebuild_wrapper_subclass":
            return local_shard(args, state)
        if of_type.name not in _PLAIN_TYPES:
            raise ValueError(f"tensors of the type {of_type.name} are not read")
        # `function` is a stub; calling its class gives the stub of the call.
        return self.rules()[function.name](type(function)(*args))

    def _storage(self, stub: Stub) -> _Storage:
        kind, of_class, key, _, num_elements = stub.args[0]
        name = of_class.name.removeprefix("torch.").removeprefix("storage.")
        if kind != "storage" or name not in STORAGES or not isinstance(key, str):
            raise ValueError(f"{reprlib.repr(stub.args[0])} is not a storage")
        member, dtype = f"{self.folder}data/{key}", STORAGES[name]
        nbytes = num_elements * dtype.itemsize
        if self.archive.nbytes(member) != nbytes:
            raise ValueError(
                f"storage {key!r} would have {nbytes:,} bytes, and its member has "
                f"{self.archive.nbytes(member):,}"
            )
        return _Storage(member, dtype, nbytes)

    def _tensor(
        self, stub: Stub, named: np.dtype | None = None, metadata: int = 6
    ) -> LazyTensor:
        """Rebuilds a tensor.

        Args:
          stub: Call that rebuilds it.
          named: Dtype that the call names; None for that of the storage.
          metadata: Index of the argument that says how views are read, if there is one.
        """
        storage, offset, shape, strides = stub.args[:4]
        said = stub.args[metadata] if len(stub.args) > metadata else None
        views = dict(said) if isinstance(said, dict) else {}
        if said and (not views or not {"conj", "neg"} >= views.keys()):
            raise ValueError(
                f"a tensor has the metadata {reprlib.repr(said)}, which is not read"
            )
        dtype: np.dtype = storage.dtype if named is None else named
        sizes = (offset, *shape, *strides)
        if len(shape) != len(strides) or not all(_is_size(size) for size in sizes):
            raise ValueError(
                f"{reprlib.repr(sizes)} are not offset, shape and strides of a tensor"
            )
        tensor = LazyTensor(
            self.archive,
            storage.member,
            tuple(shape),
            dtype,
            offset,
            tuple(strides),
            bool(views.get("conj")),
            bool(views.get("neg")),
        )
        last = sum((n - 1) * by for n, by in zip(shape, strides, strict=True))
        end = (offset + last + 1) * dtype.itemsize
        if math.prod(shape) > 0 and end > storage.nbytes:
            raise ValueError(
                f"a tensor of shape {tensor.shape} would end at byte {end:,} of "
                f"'{storage.member}', which has {storage.nbytes:,}"
            )
        return tensor


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
