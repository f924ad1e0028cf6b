"""Objects in the memory of a Kvasir store node on the same host.

    from kvasir_client import Client

    with Client("/run/kvasir/node", tenant="me", object_bytes_max=128 << 10) as client:
        client.put({b"first": b"some bytes"})
        (view,) = client.get([b"first"])     # a read-only memoryview into the node's memory: no copy
        assert view == b"some bytes"

A view holds its object pinned for as long as it lives: drop it (or `release()` it) when it is read.
The views of one `get` are pinned together. Names are bytes or text, objects anything that exports
contiguous bytes (bytes, bytearray, memoryview, a NumPy array). One client may be used by many threads;
calls let other threads run. A process that forks opens anew.

`pip install store-node/client/python` installs it; it brings its C library `libkvasir_client_c.so`, which cargo builds then.
"""

import ctypes
import enum
import os

from . import _library

__all__ = [
    "Client", "Class", "Outcome", "Outcomes", "Tier", "Error", "Unreachable", "Refused", "Lost", "NoSpace",
    "Draining", "Invalid", "Protocol",
]


class Error(Exception):
    """Nothing was done; the text says why."""


class Unreachable(Error):
    """Nobody answers there (yet): try again later."""


class Refused(Error):
    """The node said no, and will say so again until something is set otherwise."""


class Lost(Error):
    """The node is gone or has expelled this client: open anew. Views may be read on."""


class NoSpace(Error):
    """There is no room: drop views, or try again later."""


class Draining(Error):
    """The node is draining: use another one."""


class Invalid(Error):
    """An argument cannot be right."""


class Protocol(Error):
    """A node of another version, or a bug."""


_ERRORS = [None, Unreachable, Refused, Lost, NoSpace, Draining, Invalid, Protocol]


class Class(enum.IntEnum):
    """How long an object is kept."""

    NORMAL = 0  # as long as there is room
    EPHEMERAL = 1  # until it is removed, or the client that put it closes or dies
    CONTEXT = 2  # on the SSD for the tenant, until its time to live is over


class Outcome(enum.IntEnum):
    """What became of an object that was put."""

    STORED = 0
    EXISTS = 1  # it was there before, and stays as it is
    LOST = 2  # it is not there: put it again
    NOT_KEPT = 3  # it is there as a normal object, but is not kept
    REFUSED = 4  # its key is that of a block of another namespace


class Outcomes(list):
    """An `Outcome` for each object of a put, in order.

    why: in words why one is `Outcome.NOT_KEPT`, and what to do; of several the last one's. Empty where all are kept.
    """

    def __init__(self, outcomes, why=""):
        super().__init__(outcomes)
        self.why = why


class Tier(enum.IntEnum):
    """Where an object can be had fastest."""

    ABSENT = 0
    DRAM = 1
    SSD = 2


def _as_bytes(name):
    return name.encode() if isinstance(name, str) else name


class _Pins:
    """The pins of one get, dropped with the last view into them."""

    def __init__(self, library, handle):
        self._library, self._handle = library, handle

    def is_current(self, position):
        return bool(self._library.kvasir_is_current(self._handle, position))

    def __del__(self):
        self._library.kvasir_release(self._handle)


class Client:
    """A store node that is open.

    attach_dir: the node's `attach_dir`.
    tenant, namespace: objects are found by clients that name the same. The tenant also owns the quota
        of what is kept as `Class.CONTEXT`.
    object_bytes_max: the longest object that will be put. Where nobody has said yet how large the
        node's slots are, they are made to hold it; 0 takes them as they are.
    polling_us: how long a call looks for its answer before it sleeps.
    library: the path of `libkvasir_client_c.so`, where it is not beside this package or on the
        loader's path.
    """

    def __init__(self, attach_dir, *, tenant="", namespace="", object_bytes_max=0, polling_us=50,
                 library=None):
        self._handle = None
        self._library = _library.load(library)
        options = _library.OpenOptions(
            os.fsencode(attach_dir), tenant.encode(), namespace.encode(), object_bytes_max, polling_us
        )
        handle = ctypes.c_void_p()
        self._check(self._library.kvasir_open(ctypes.byref(options), ctypes.byref(handle)))
        self._handle = handle

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Closes the node. Views may be read on, and keep what they show pinned."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.kvasir_close(handle)

    def __del__(self):
        if getattr(self, "_handle", None) is not None:
            self.close()

    def _check(self, status):
        if status:
            raise _ERRORS[status](self._library.kvasir_last_error().decode())

    def _open(self):
        if self._handle is None:
            raise Invalid("the client is closed")
        return self._handle

    @property
    def object_bytes_max(self):
        """The longest object that a slot of this node holds."""
        return self._library.kvasir_object_bytes_max(self._open())

    @property
    def objects_max(self):
        """The most objects of one put, get or remove."""
        return self._library.kvasir_objects_max(self._open())

    def put(self, objects, *, object_class=Class.NORMAL, ttl_ms=0):
        """Puts objects (a mapping of names to bytes, or pairs): each is copied once, into the node's
        memory, and found when all of it is there. Answers with the `Outcomes`: what is `STORED` or `EXISTS` of
        `Class.CONTEXT` is durable now, what is `NOT_KEPT` is not."""
        pairs = list(objects.items() if hasattr(objects, "items") else objects)
        handle, options = self._open(), _library.PutOptions(int(object_class), ttl_ms)
        outcomes = (ctypes.c_int * len(pairs))()
        with _library.Buffers(_as_bytes(name) for name, _ in pairs) as names, \
                _library.Buffers(value for _, value in pairs) as values:
            self._check(self._library.kvasir_put(
                handle, len(pairs), names.array, values.array, ctypes.byref(options), outcomes
            ))
        outcomes = Outcomes(Outcome(outcome) for outcome in outcomes)
        if Outcome.NOT_KEPT in outcomes:
            outcomes.why = self._library.kvasir_last_error().decode()
        return outcomes

    def get(self, names, *, verify=False, node=None):
        """Answers for each name with a read-only view of its object, or None. With `verify` checksums
        are computed, and an object that has another one is a miss. With `node`, the gRPC address of
        another node as "host:port", what is not here is fetched from there first; what comes is always
        verified."""
        handle, names = self._open(), [_as_bytes(name) for name in names]
        objects, batch = (_library.Object * len(names))(), ctypes.c_void_p()
        with _library.Buffers(names) as buffers:
            wanted = (len(names), buffers.array)
            if node is None:
                status = self._library.kvasir_get(
                    handle, *wanted, int(verify), objects, ctypes.byref(batch)
                )
            else:
                if verify:
                    raise Invalid("`verify` is for what is here; what comes is always verified")
                status = self._library.kvasir_get_from(
                    handle, node.encode(), *wanted, objects, ctypes.byref(batch)
                )
            self._check(status)
        pins = _Pins(self._library, batch)
        return [_view(pins, found) if found.data else None for found in objects]

    def fetch(self, names, node):
        """Brings objects to this node from another one, whose gRPC address is `node`, as in
        "10.0.0.7:7401"; answers of each whether it is here now."""
        handle, names = self._open(), [_as_bytes(name) for name in names]
        here = (ctypes.c_int * len(names))()
        with _library.Buffers(names) as buffers:
            self._check(self._library.kvasir_fetch(
                handle, node.encode(), len(names), buffers.array, here
            ))
        return [bool(came) for came in here]

    def find(self, names):
        """Where each of these objects can be had fastest."""
        handle, names = self._open(), [_as_bytes(name) for name in names]
        tiers = (ctypes.c_int * len(names))()
        with _library.Buffers(names) as buffers:
            self._check(self._library.kvasir_find(handle, len(names), buffers.array, tiers))
        return [Tier(tier) for tier in tiers]

    def exists(self, names):
        """Whether each of these objects is on this node."""
        return [tier != Tier.ABSENT for tier in self.find(names)]

    def remove(self, names):
        """Forgets objects, on the SSD and in the object store too; answers how many were there, when no
        restart of the node brings one back. Views of them may be read on."""
        handle, names = self._open(), [_as_bytes(name) for name in names]
        removed = ctypes.c_size_t()
        with _library.Buffers(names) as buffers:
            self._check(self._library.kvasir_remove(
                handle, len(names), buffers.array, ctypes.byref(removed)
            ))
        return removed.value


def _view(pins, found):
    place = (ctypes.c_ubyte * found.bytes).from_address(found.data)
    # The view holds what it was made of, and that the pins.
    place.pins = pins
    return memoryview(place).cast("B").toreadonly()
