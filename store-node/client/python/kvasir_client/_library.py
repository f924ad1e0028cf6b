"""The C library, as its headers `kvasir.h` and `kvasir_engine.h` declare it, and the buffers that go into its calls."""

import ctypes
import ctypes.util
import functools
import pathlib

NAME = "libkvasir_client_c.so"


class Bytes(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


class OpenOptions(ctypes.Structure):
    _fields_ = [
        ("attach_dir", ctypes.c_char_p),
        ("tenant", ctypes.c_char_p),
        ("name_space", ctypes.c_char_p),
        ("object_bytes_max", ctypes.c_uint64),
        ("polling_us", ctypes.c_uint64),
    ]


class PutOptions(ctypes.Structure):
    _fields_ = [("object_class", ctypes.c_int), ("ttl_ms", ctypes.c_uint64)]


class Object(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("offset_bytes", ctypes.c_uint64),
        ("generation", ctypes.c_uint32),
    ]


class Load(ctypes.Structure):
    _fields_ = [
        ("running_requests", ctypes.c_uint32),
        ("waiting_requests", ctypes.c_uint32),
        ("waiting_prompt_tokens", ctypes.c_uint64),
        ("computed_prompt_tokens", ctypes.c_uint64),
    ]


_P, _N, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_FUNCTIONS = {
    "kvasir_last_error": (ctypes.c_char_p, []),
    "kvasir_open": (_I, [_P, _P]),
    "kvasir_close": (None, [_P]),
    "kvasir_object_bytes_max": (_N, [_P]),
    "kvasir_objects_max": (_N, [_P]),
    "kvasir_put": (_I, [_P, _N, _P, _P, _P, _P]),
    "kvasir_get": (_I, [_P, _N, _P, _I, _P, _P]),
    "kvasir_get_from": (_I, [_P, _P, _N, _P, _P, _P]),
    "kvasir_fetch": (_I, [_P, _P, _N, _P, _P]),
    "kvasir_release": (None, [_P]),
    "kvasir_is_current": (_I, [_P, _N]),
    "kvasir_find": (_I, [_P, _N, _P, _P]),
    "kvasir_remove": (_I, [_P, _N, _P, _P]),
    "kvasir_engine_attach": (_I, [_P, _P, _N, _P]),
    "kvasir_engine_detach": (None, [_P]),
    "kvasir_engine_slots": (_P, [_P, _P]),
    "kvasir_engine_slots_fd": (_I, [_P]),
    "kvasir_engine_pool": (_P, [_P, _P]),
    "kvasir_engine_pool_fd": (_I, [_P]),
    "kvasir_engine_slots_total": (ctypes.c_uint32, [_P]),
    "kvasir_engine_is_connected": (_I, [_P]),
    "kvasir_engine_send": (_I, [_P, _P, _N]),
    "kvasir_engine_receive": (_I, [_P, ctypes.c_uint64, _P]),
    "kvasir_engine_wake": (None, [_P]),
    "kvasir_engine_progress": (None, [_P, ctypes.c_uint32, ctypes.c_uint16]),
    "kvasir_engine_publish_load": (None, [_P, _P]),
}


@functools.lru_cache(maxsize=None)
def load(path=None):
    """The library at this path, beside this package, or where the loader finds it."""
    beside = pathlib.Path(__file__).parent / NAME
    library = ctypes.CDLL(str(path or (beside if beside.exists() else NAME)))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class _Buffer(ctypes.Structure):
    """Python's `Py_buffer`."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.restype = ctypes.c_int
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.restype = None
_release_buffer.argtypes = [ctypes.POINTER(_Buffer)]
_SIMPLE = 0  # PyBUF_SIMPLE: contiguous bytes, or an error


class Buffers:
    """The memory of objects that export their bytes, for the time of one call and without a copy."""

    def __init__(self, exporters):
        self._exporters = list(exporters)
        self._held = []

    def __enter__(self):
        self.array = (Bytes * len(self._exporters))()
        try:
            for at, exporter in enumerate(self._exporters):
                held = _Buffer()
                # Raises the exceptions of the exporter.
                _get_buffer(exporter, ctypes.byref(held), _SIMPLE)
                self._held.append(held)
                self.array[at] = Bytes(held.buf, held.len)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        while self._held:
            _release_buffer(ctypes.byref(self._held.pop()))
