"""Call a kernel library with CUDA tensors that exist in name only, against the recording driver. Runs in a process of its own.

Usage: fake_call.py kernel.so calls.json. Each call is {"args": [...], "stream": int}; an argument is {"address", "shape", "dtype"
[code, bits], and optionally "device", "strides", "byte_offset"}, or any other JSON value. Prints a JSON list: null, or [error type, text].
"""

import ctypes
import json
import sys

sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would import it: seconds, and real CUDA libraries
import tvm_ffi  # noqa: E402


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


kept = []  # the structures must outlive the capsules


class NamedTensor:
    """A DLPack producer of memory that nobody has."""

    def __init__(self, spec):
        shape = (ctypes.c_int64 * len(spec["shape"]))(*spec["shape"])
        strides = (ctypes.c_int64 * len(shape))(*spec["strides"]) if "strides" in spec else None
        tensor = DLTensor(
            spec["address"],
            spec.get("device_type", 2),
            spec.get("device", 0),
            len(shape),
            *spec["dtype"],
            1,
            shape,
            strides,
            spec.get("byte_offset", 0),
        )
        self.managed = DLManagedTensor(tensor, None, None)
        kept.append((self.managed, shape, strides))

    def __dlpack_device__(self):
        return self.managed.tensor.device_type, self.managed.tensor.device_id

    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.managed), b"dltensor", None)


def argument(spec):
    return tvm_ffi.from_dlpack(NamedTensor(spec)) if isinstance(spec, dict) else spec


def main(library, calls):
    module = tvm_ffi.load_module(library)
    outcomes = []
    for call in calls:
        try:
            arguments = [argument(spec) for spec in call["args"]]
            with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), call.get("stream", 0)):
                module[call.get("function", "run")](*arguments)
            outcomes.append(None)
        except Exception as error:
            outcomes.append([type(error).__name__, str(error)])
    print(json.dumps(outcomes))


if __name__ == "__main__":
    with open(sys.argv[2]) as file:
        main(sys.argv[1], json.load(file))
