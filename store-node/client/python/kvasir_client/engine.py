"""Attaches an inference engine to the Kvasir store node of its host.

    from kvasir_client.engine import Engine

    with Engine("/run/kvasir/node", request) as engine:     # an `AttachRequest`
        rows = numpy.frombuffer(engine.slots, dtype)        # the node's slots: no copy
        engine.send(message)                                # an `EngineToNode`
        said = engine.receive(timeout_s=0.1)                # a `NodeToEngine` as bytes, or None

Engine and node exchange the Protocol Buffers messages of `proto/kvasir/v1/attach.proto`, which documents
them; generate their classes with a tool of your choice. `request` and `message` are bytes, or anything with
`SerializeToString`. The conductor calls the engine over gRPC (`proto/kvasir/v1/engine.proto`) at the
address in the request.

Several engines may attach to a node, each with its own name. Concurrent calls of `send` wait for each other,
and so do calls of `receive`; both release the GIL. After a fork the child process must attach an engine of
its own.
"""

import ctypes
import mmap
import os

from . import Invalid, _ERRORS, _library

__all__ = ["Engine"]


def _encoded(message):
    serialize = getattr(message, "SerializeToString", None)
    return serialize() if serialize else bytes(message)


class Engine:
    """An attached engine.

    attach_dir: the node's `attach_dir`.
    request: an `AttachRequest`, in which the library sets `pid`.
    library: the path of `libkvasir_client_c.so`, if it is not next to this package or on the
        loader's path.
    """

    def __init__(self, attach_dir, request, *, library=None):
        self._handle = None
        self._library = _library.load(library)
        encoded, handle = _encoded(request), ctypes.c_void_p()
        self._check(self._library.kvasir_engine_attach(
            os.fsencode(attach_dir), encoded, len(encoded), ctypes.byref(handle)
        ))
        self._handle = handle
        length = ctypes.c_size_t()
        self._library.kvasir_engine_slots(handle, ctypes.byref(length))
        # A separate mapping, so that arrays over it stay valid after the engine is detached.
        self._slots = mmap.mmap(self.slots_fd, length.value)
        self._library.kvasir_engine_pool(handle, ctypes.byref(length))
        self._pool = mmap.mmap(self.pool_fd, length.value) if length.value else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.detach()

    def detach(self):
        """Detaches the engine. Slots and pool must not be accessed afterwards. No other call may be in progress."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.kvasir_engine_detach(handle)

    def __del__(self):
        if getattr(self, "_handle", None) is not None:
            self.detach()

    def _check(self, status):
        if status:
            raise _ERRORS[status](self._library.kvasir_last_error().decode())

    def _open(self):
        if self._handle is None:
            raise Invalid("the engine is detached")
        return self._handle

    @property
    def slots(self):
        """The node's slots, readable and writable. Slot i starts at `i * slot_bytes` of the layout. The engine
        may only access slots that were bound or granted, and may only write pages that are not cached."""
        return memoryview(self._slots)

    @property
    def slots_fd(self):
        """The descriptor of that memory, to register it with a device. `detach` closes it."""
        return self._library.kvasir_engine_slots_fd(self._open())

    @property
    def pool(self):
        """The engine's own pages, readable and writable, if the request contains a pool in host memory; else
        None. Pages that are held or being filled must not be written before `PagesDropped` or `PagesFilled`. A
        prompt may be computed in the pool (a `StepPlan` names the pages as `pool_pages`): layers that `progress`
        has announced must not be written before `PagesDropped`, and the slots of these pages must not be written
        at all."""
        return memoryview(self._pool) if self._pool is not None else None

    @property
    def pool_fd(self):
        """The descriptor of that memory; -1 without a pool. `detach` closes it."""
        return self._library.kvasir_engine_pool_fd(self._open())

    @property
    def slots_total(self):
        return self._library.kvasir_engine_slots_total(self._open())

    @property
    def is_connected(self):
        """False after the node is gone or has detached this engine. The slots must not be written then."""
        return bool(self._library.kvasir_engine_is_connected(self._open()))

    def send(self, message):
        """Sends an `EngineToNode`. `NoCapacity`: the node has read no message for 50 ms."""
        encoded = _encoded(message)
        self._check(self._library.kvasir_engine_send(self._open(), encoded, len(encoded)))

    def receive(self, timeout_s=0.0):
        """Returns the next `NodeToEngine` as bytes, or None. Waits for one until the timeout or until a thread
        calls `wake`, and may return earlier."""
        message = _library.Bytes()
        self._check(self._library.kvasir_engine_receive(
            self._open(), round(timeout_s * 1e6), ctypes.byref(message)
        ))
        return ctypes.string_at(message.data, message.bytes) if message.bytes else None

    def wake(self):
        """Wakes a `receive` that waits in another thread."""
        self._library.kvasir_engine_wake(self._open())

    def progress(self, step, layers_done):
        """Announces that layers `[0, layers_done)` of a step are written, to the slots or to the pool, as in its
        `StepPlan`. The node may send them from now on. Data that a GPU wrote must be complete, not only
        enqueued."""
        self._library.kvasir_engine_progress(self._open(), step, layers_done)

    def publish_load(self, *, running_requests=0, waiting_requests=0, waiting_prompt_tokens=0,
                     computed_prompt_tokens=0):
        """Publishes the engine's load, for admission. `computed_prompt_tokens` counts since the engine started. The call
        is cheap: use it at every change."""
        load = _library.Load(running_requests, waiting_requests, waiting_prompt_tokens, computed_prompt_tokens)
        self._library.kvasir_engine_publish_load(self._open(), ctypes.byref(load))
