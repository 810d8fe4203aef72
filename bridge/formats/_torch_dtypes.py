"""numpy dtypes of torch's dtypes and storage classes."""

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "bool": np.dtype(np.bool_),
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "uint16": np.dtype("<u2"),
    "int16": np.dtype("<i2"),
    "uint32": np.dtype("<u4"),
    "int32": np.dtype("<i4"),
    "uint64": np.dtype("<u8"),
    "int64": np.dtype("<i8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "complex64": np.dtype("<c8"),
    "complex128": np.dtype("<c16"),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""numpy dtypes by the torch dtype's name, without `torch.`."""

DTYPE_NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# Other dtypes are stored as bytes, with the dtype recorded beside the storage.
STORAGES: dict[str, np.dtype] = {
    "BoolStorage": DTYPES["bool"],
    "ByteStorage": DTYPES["uint8"],
    "CharStorage": DTYPES["int8"],
    "ShortStorage": DTYPES["int16"],
    "IntStorage": DTYPES["int32"],
    "LongStorage": DTYPES["int64"],
    "HalfStorage": DTYPES["float16"],
    "BFloat16Storage": DTYPES["bfloat16"],
    "FloatStorage": DTYPES["float32"],
    "DoubleStorage": DTYPES["float64"],
    "ComplexFloatStorage": DTYPES["complex64"],
    "ComplexDoubleStorage": DTYPES["complex128"],
    "UntypedStorage": DTYPES["uint8"],
}
"""Element dtypes by the storage class's name, without `torch.`."""

STORAGE_NAMES: dict[np.dtype, str] = {
    dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"
}
