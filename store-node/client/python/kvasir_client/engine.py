"""The attach of an inference engine to the Kvasir store node of its host.

    from kvasir_client.engine import Engine

    with Engine("/run/kvasir/node", request) as engine:     # an `AttachRequest`
        rows = numpy.frombuffer(engine.slots, dtype)        # the node's slots: no copy
        engine.send(message)                                # an `EngineToNode`
        said = engine.receive(timeout_s=0.1)                # a `NodeToEngine` as bytes, or None

What engine and node say to each other are the Protocol Buffers messages of `proto/kvasir/v1/attach.proto`,
whose comments say what each means; generate their classes with the tools of your choice. `request` and
`message` are bytes, or anything with `SerializeToString`. The conductor calls the engine over gRPC
(`proto/kvasir/v1/engine.proto`), at the address that the request names.

Several engines may attach to a node, each by its own name. Calls of `send` wait for each other, and so do calls of
`receive`; both let other threads run. A process that forks attaches anew.
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
    """An engine that is attached.

    attach_dir: the node's `attach_dir`.
    request: what the engine says of itself: an `AttachRequest`. Its `pid` is filled in.
    library: the path of `libkvasir_client_c.so`, where it is not beside this package or on the
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
        # A mapping of its own: arrays over it stay valid for the interpreter whatever becomes of the attach.
        self._slots = mmap.mmap(self.slots_fd, length.value)
        self._library.kvasir_engine_pool(handle, ctypes.byref(length))
        self._pool = mmap.mmap(self.pool_fd, length.value) if length.value else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.detach()

    def detach(self):
        """Says goodbye: from then on slots and pool must not be touched. No other call may be under way."""
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
        """The node's slots, to be read and written: slot i begins at `i * slot_bytes` of the layout. Only
        slots that were bound or granted may be touched, and only bytes of pages that are not cached may be
        written."""
        return memoryview(self._slots)

    @property
    def slots_fd(self):
        """The descriptor of that memory, to register it with a device. It is closed with the attach."""
        return self._library.kvasir_engine_slots_fd(self._open())

    @property
    def pool(self):
        """The engine's own pages, to be read and written, where the request asks for a pool in memory of the
        host; otherwise None. Pages that are held or being filled must not be written until `PagesDropped` or
        `PagesFilled` has come. A prompt may be computed there (a `StepPlan` names the pages as `pool_pages`): layers
        that `progress` has named must not be written until `PagesDropped` has come, and slots of these pages not
        at all."""
        return memoryview(self._pool) if self._pool is not None else None

    @property
    def pool_fd(self):
        """The descriptor of that memory; -1 where there is none. It is closed with the attach."""
        return self._library.kvasir_engine_pool_fd(self._open())

    @property
    def slots_total(self):
        return self._library.kvasir_engine_slots_total(self._open())

    @property
    def is_connected(self):
        """False once the node is gone or has detached this engine. Slots must then not be written."""
        return bool(self._library.kvasir_engine_is_connected(self._open()))

    def send(self, message):
        """Sends an `EngineToNode`. `NoSpace`: the node has taken nothing for 50 ms."""
        encoded = _encoded(message)
        self._check(self._library.kvasir_engine_send(self._open(), encoded, len(encoded)))

    def receive(self, timeout_s=0.0):
        """The next `NodeToEngine` as bytes, or None. It waits for one until the time is over or somebody
        calls `wake`, and may return earlier."""
        message = _library.Bytes()
        self._check(self._library.kvasir_engine_receive(
            self._open(), round(timeout_s * 1e6), ctypes.byref(message)
        ))
        return ctypes.string_at(message.data, message.bytes) if message.bytes else None

    def wake(self):
        """Ends the waiting of `receive` in another thread."""
        self._library.kvasir_engine_wake(self._open())

    def progress(self, step, layers_done):
        """Says that layers `[0, layers_done)` of a step are written, into slots or into the pool as its `StepPlan`
        says: the node may send them from now on. What a GPU writes must be complete, not only enqueued."""
        self._library.kvasir_engine_progress(self._open(), step, layers_done)

    def publish_load(self, *, running=0, waiting=0, waiting_prompt_tokens=0, computed_prompt_tokens=0):
        """What the engine is doing, for admission; `computed_prompt_tokens` since it attached. Cheap: call
        it as often as it changes."""
        load = _library.Load(running, waiting, waiting_prompt_tokens, computed_prompt_tokens)
        self._library.kvasir_engine_publish_load(self._open(), ctypes.byref(load))
