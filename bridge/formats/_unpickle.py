"""Safe reading of untrusted pickles: parsed as data, never executed.

A pickle is a program that may call anything importable. Here nothing is imported:
each name becomes a `Stub`, a new class that only records its arguments, so that any
pickle builds plain data. Rules then interpret the stubs.

Names that are not in an allowlist are rejected, although their stubs would be
harmless: a checkpoint that names `os.system` should not be trusted for its weights.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from bridge.formats._pickle_keys import check_key
from bridge.formats._pickle_opcodes import check_opcodes
from bridge.formats._torch_dtypes import DTYPES, STORAGES

# A `.metadata` file of 100,000 chunks, with the plans of all ranks, has about 100 MB.
_MAX_PICKLE_BYTES = 2**28

_TORCH_NAMES = {f"torch.{name}" for name in (*DTYPES, *STORAGES)}
_DCP = "torch.distributed.checkpoint"
_KNOWN_NAMES = {
    *_TORCH_NAMES,
    "torch.Size",
    "torch.device",
    "torch.storage.UntypedStorage",
    "torch.storage.TypedStorage",
    "torch.serialization._get_layout",
    "torch._C.Generator",
    "torch.Tensor",
    "torch.nn.parameter.Buffer",
    "torch.nn.parameter.Parameter",
    "torch._tensor._rebuild_from_type_v2",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    f"{_DCP}.filesystem._StorageInfo",
    f"{_DCP}.filesystem._StoragePrefix",
    f"{_DCP}.filesystem.SerializationFormat",
    *(
        f"{_DCP}.metadata.{name}"
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(
        f"{_DCP}.planner.{name}"
        for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
    # Distributed tensors, by the names of several versions of torch.
    "torch._utils._rebuild_wrapper_subclass",
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor._api.DTensor",
    "torch.distributed._tensor.api.DTensor",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._mesh_layout._FlatLayout",
    "torch.distributed._mesh_layout._MeshLayout",
    *(
        f"torch.distributed.{module}.{name}"
        for module in ("tensor", "_tensor")
        for name in (
            "_dtensor_spec.DTensorSpec",
            "_dtensor_spec.ShardOrderEntry",
            "_dtensor_spec.TensorMeta",
            "placement_types.DTensorSpec",
            "placement_types.Partial",
            "placement_types.Replicate",
            "placement_types.Shard",
            "placement_types.TensorMeta",
            "placement_types._StridedShard",
        )
    ),
    # Names before torch 2.3.
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "argparse.Namespace",
    "types.SimpleNamespace",
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.deque",
    "_codecs.encode",
    "_io.BytesIO",
    "signal.Signals",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib._local.PosixPath",
    "datetime.datetime",
    "datetime.timedelta",
    # Protocol 2 uses Python 2's module name, `__builtin__`.
    *(
        f"{module}.{name}"
        for module in ("builtins", "__builtin__")
        for name in ("bytearray", "complex", "dict", "frozenset", "int", "list", "set")
    ),
    *(
        f"{module}.multiarray.{name}"
        for module in ("numpy.core", "numpy._core")
        for name in ("_reconstruct", "scalar")
    ),
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
}
# Packages with many, often changing classes: all of their names are allowed.
_KNOWN_PACKAGES = {"megatron", "transformer_engine", "modelopt", "nemo"}


class Stub:
    """Inert record of what a pickle does with one name.

    Attributes:
      name: Full name of the class or function in the pickle.
      args: Arguments of the call.
      state: State to restore; None if there is none.
      entries: Items set by key, as in a dict; None if there are none.
      elements: Items appended, as to a list; None if there are none.
    """

    __slots__ = ("args", "elements", "entries", "state")
    name: ClassVar[str] = ""
    args: tuple[Any, ...]
    state: Any
    entries: dict[Any, Any] | None
    elements: list[Any] | None

    def __new__(cls, *args: Any):
        self = object.__new__(cls)
        self.args, self.state, self.entries, self.elements = args, None, None, None
        return self

    def __setstate__(self, state: Any) -> None:
        # Also prevents a pickle from setting class attributes: BUILD on the class
        # itself calls this method unbound, which fails for lack of an argument.
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries = {} if self.entries is None else self.entries
        self.entries[key] = value

    def append(self, element: Any) -> None:
        """Records an appended element."""
        self.elements = [] if self.elements is None else self.elements
        self.elements.append(element)

    def __repr__(self) -> str:
        # Without arguments: of shared ones the text would grow exponentially.
        return f"<{self.name}>"


PERSISTENT_ID = "a persistent id"
"""Name of the stubs for objects outside of the pickle, such as tensor storages."""

Rule = Callable[[Stub], Any]
"""Function that converts a stub whose contents have been interpreted already."""


def unpickle(program: bytes, subject: str, rules: Mapping[str, Rule]) -> Any:
    """Reads a pickle as data.

    Args:
      program: Bytes of one pickle.
      subject: Description of the pickle, to begin the error message.
      rules: Conversions of stubs by name; stubs without a rule are kept.

    Returns:
      Tree of lists, tuples, dicts, strings, numbers, stubs and results of rules.

    Raises:
      ValueError: If the pickle names anything that is not expected in a checkpoint,
        is damaged or larger than 256 MiB, or a rule fails.
    """
    try:
        if len(program) > _MAX_PICKLE_BYTES:
            raise ValueError(f"it has {len(program):,} bytes, a checkpoint's has fewer")
        check_opcodes(program)
        return _Interpreter(rules).interpret(_Unpickler(io.BytesIO(program)).load())
    except _Refused as error:
        raise ValueError(
            f"{subject} asks for {error}, which no checkpoint needs. Nothing was run. "
            "Do not trust this file: if it is your own, save its tensors alone, as a "
            "state dict or as safetensors."
        ) from None
    except Exception as error:  # a malformed pickle may raise anything
        raise ValueError(
            f"{subject} is a pickle that cannot be read: {error or type(error)}. "
            "Nothing of it was run; the file is damaged, or of another kind."
        ) from error


class _Refused(Exception):
    """Rejected name; not a ValueError, to distinguish it from other failures."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO):
        super().__init__(stream)
        self._stubs: dict[str, Any] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name}.{global_name}"
        known = module_name.partition(".")[0] in _KNOWN_PACKAGES
        if not known and name not in _KNOWN_NAMES:
            raise _Refused(f"'{name}'")
        return self._stub(name)

    def persistent_load(self, pid: Any, /) -> Stub:
        return self._stub(PERSISTENT_ID)(pid)

    def _stub(self, name: str) -> Any:
        if name not in self._stubs:
            # A class, not an instance: NEWOBJ requires one.
            body = {"__slots__": (), "name": name, "__doc__": Stub.__doc__}
            self._stubs[name] = type("Stub", (Stub,), body)
        return self._stubs[name]


_ATOMS = frozenset({str, int, float, bool, bytes, type(None)})


def check_hashable(key: Any) -> None:
    """Checks that an interpreted value can be hashed, as a key, in little time.

    Raises:
      ValueError: As `check_key` does.
    """
    check_key(key, (*_ATOMS, Stub, np.dtype))


class _Interpreter:
    """Applies rules from the leaves up, and preserves shared references."""

    def __init__(self, rules: Mapping[str, Rule]):
        self._rules = rules
        self._done: dict[int, Any] = {}
        # Keeps interpreted values alive: the id of a freed object may be reused.
        self._alive: list[Any] = []
        self._open: set[int] = set()

    def interpret(self, value: Any) -> Any:
        if type(value) in _ATOMS:
            return value
        key = id(value)
        if key in self._open:
            raise ValueError(f"a {type(value).__name__} of it contains itself")
        if key not in self._done:
            self._open.add(key)
            self._done[key] = self._make(value)
            self._alive.append(value)
            self._open.remove(key)
        return self._done[key]

    def _make(self, value: Any) -> Any:
        if isinstance(value, Stub):
            return self._apply(value)
        if isinstance(value, type) and issubclass(value, Stub):
            return self._apply(value())  # a name alone: a dtype, a class of storage
        if isinstance(value, dict):
            return {self._key(k): self.interpret(v) for k, v in value.items()}
        if isinstance(value, (set, frozenset)):
            return type(value)(self._key(v) for v in value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.interpret(v) for v in value)
        return value

    def _key(self, value: Any) -> Any:
        key = self.interpret(value)
        if type(key) not in _ATOMS:
            check_hashable(key)
        return key

    def _apply(self, stub: Stub) -> Any:
        if stub.args:
            stub.args = self.interpret(stub.args)
        stub.state = self.interpret(stub.state)
        stub.entries = self.interpret(stub.entries)
        stub.elements = self.interpret(stub.elements)
        rule = self._rules.get(stub.name)
        return stub if rule is None else rule(stub)
