"""Objects in the memory of a Kvasir store node on the same host.

    from kvasir_client import Client

    with Client("/run/kvasir/node", tenant="me", object_bytes_max=128 << 10) as client:
        client.put({b"first": b"some bytes"})
        (view,) = client.get([b"first"])     # a read-only memoryview into the node's memory: no copy
        assert view == b"some bytes"

A view pins its object while it exists: drop it (or `release()` it) after reading. The views of one
`get` are pinned together. Names are bytes or text. Objects are anything that exports contiguous bytes
(bytes, bytearray, memoryview, a NumPy array). Many threads may use one client; calls release the GIL.
After a fork the child process must open a client of its own.

Install it with `pip install store-node/client/python`, which builds the C library
`libkvasir_client_c.so` with cargo and includes it.
"""

import ctypes
import enum
import os

from . import _library

__all__ = [
    "Client", "ObjectClass", "Outcome", "Outcomes", "Tier", "Error", "Unreachable", "Refused", "Lost", "NoCapacity",
    "Draining", "Invalid", "Protocol",
]


class Error(Exception):
    """The call had no effect; the message contains the cause and the remedy."""


class Unreachable(Error):
    """No node answers: try again later."""


class Refused(Error):
    """The node refused the request, and will refuse it again until a setting changes."""


class Lost(Error):
    """The node is gone or has disconnected this client: open a new client. Views stay readable."""


class NoCapacity(Error):
    """No space: drop views, or try again later."""


class Draining(Error):
    """The node is draining: use another one."""


class Invalid(Error):
    """An argument is invalid."""


class Protocol(Error):
    """The node has another version, or there is a bug."""


_ERRORS = [None, Unreachable, Refused, Lost, NoCapacity, Draining, Invalid, Protocol]


class ObjectClass(enum.IntEnum):
    """How long an object is kept."""

    NORMAL = 0  # kept until it is evicted
    EPHEMERAL = 1  # in DRAM until it is removed, or until the client that put it closes or ends
    CONTEXT = 2  # on the SSD for the tenant until its time to live ends


class Outcome(enum.IntEnum):
    """The outcome of a put for one object."""

    STORED = 0
    EXISTS = 1  # it was present and is unchanged
    LOST = 2  # it is absent: put it again
    NOT_PERSISTED = 3  # it is present as a normal object, but is not persisted
    REFUSED = 4  # the key belongs to a block of another namespace


class Outcomes(list):
    """An `Outcome` for each object of a put, in order.

    reason: the cause of an `Outcome.NOT_PERSISTED` and its remedy; the last one of several. Empty if there is none.
    """

    def __init__(self, outcomes, reason=""):
        super().__init__(outcomes)
        self.reason = reason


class Tier(enum.IntEnum):
    """The fastest tier of an object."""

    ABSENT = 0
    DRAM = 1
    SSD = 2


def _as_bytes(name):
    return name.encode() if isinstance(name, str) else name


class _Pins:
    """The pins of one get, removed with the last view."""

    def __init__(self, library, handle):
        self._library, self._handle = library, handle

    def is_current(self, position):
        return bool(self._library.kvasir_is_current(self._handle, position))

    def __del__(self):
        self._library.kvasir_release(self._handle)


class Client:
    """A client of a store node.

    attach_dir: the node's `attach_dir`.
    tenant, namespace: clients with the same two values share objects. The quota of objects of the class
        `ObjectClass.CONTEXT` belongs to the tenant.
    object_bytes_max: the size of the largest object of this client. If no engine and no other client has
        set the node's slot size, the slots are sized to hold it; 0 accepts the existing size.
    polling_us: the time that a call polls for its answer before it sleeps.
    library: the path of `libkvasir_client_c.so`, if it is not next to this package or on the
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
        """Closes the client. Views stay readable and keep their objects pinned."""
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
        """The size of the largest object that a slot of this node holds."""
        return self._library.kvasir_object_bytes_max(self._open())

    @property
    def objects_max(self):
        """The largest number of objects in one put, get or remove."""
        return self._library.kvasir_objects_max(self._open())

    def put(self, objects, *, object_class=ObjectClass.NORMAL, ttl_ms=0):
        """Puts objects (a mapping of names to bytes, or pairs). Each object is copied once, to the node's
        memory, and becomes visible when the copy is complete. Returns the `Outcomes`. An object of the class
        `ObjectClass.CONTEXT` is durable if its outcome is `STORED` or `EXISTS`."""
        pairs = list(objects.items() if hasattr(objects, "items") else objects)
        handle, options = self._open(), _library.PutOptions(int(object_class), ttl_ms)
        outcomes = (ctypes.c_int * len(pairs))()
        with _library.Buffers(_as_bytes(name) for name, _ in pairs) as names, \
                _library.Buffers(value for _, value in pairs) as values:
            self._check(self._library.kvasir_put(
                handle, len(pairs), names.array, values.array, ctypes.byref(options), outcomes
            ))
        outcomes = Outcomes(Outcome(outcome) for outcome in outcomes)
        if Outcome.NOT_PERSISTED in outcomes:
            outcomes.reason = self._library.kvasir_last_error().decode()
        return outcomes

    def get(self, names, *, verify=False, node=None):
        """Returns for each name a read-only view of its object, or None. With `verify` checksums are
        verified, and an object with a wrong checksum is a miss. With `node`, the gRPC address of another
        node as "host:port", absent objects are first fetched from there; fetched objects are always
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
                    raise Invalid("`verify` applies to local objects only; fetched objects are always verified")
                status = self._library.kvasir_get_from(
                    handle, node.encode(), *wanted, objects, ctypes.byref(batch)
                )
            self._check(status)
        pins = _Pins(self._library, batch)
        return [_view(pins, found) if found.data else None for found in objects]

    def fetch(self, names, node):
        """Fetches objects to this node from another one. `node` is its gRPC address, as in
        "10.0.0.7:7401". Returns for each object whether this node holds it now."""
        handle, names = self._open(), [_as_bytes(name) for name in names]
        present = (ctypes.c_int * len(names))()
        with _library.Buffers(names) as buffers:
            self._check(self._library.kvasir_fetch(
                handle, node.encode(), len(names), buffers.array, present
            ))
        return [bool(one) for one in present]

    def find(self, names):
        """Returns the fastest tier of each object."""
        handle, names = self._open(), [_as_bytes(name) for name in names]
        tiers = (ctypes.c_int * len(names))()
        with _library.Buffers(names) as buffers:
            self._check(self._library.kvasir_find(handle, len(names), buffers.array, tiers))
        return [Tier(tier) for tier in tiers]

    def exists(self, names):
        """Returns for each object whether this node holds it."""
        return [tier != Tier.ABSENT for tier in self.find(names)]

    def remove(self, names):
        """Removes objects durably, on the SSD and in the object store too: no restart of the node brings
        one back. Returns the number of objects that were present. Views of them stay readable."""
        handle, names = self._open(), [_as_bytes(name) for name in names]
        removed = ctypes.c_size_t()
        with _library.Buffers(names) as buffers:
            self._check(self._library.kvasir_remove(
                handle, len(names), buffers.array, ctypes.byref(removed)
            ))
        return removed.value


def _view(pins, found):
    place = (ctypes.c_ubyte * found.bytes).from_address(found.data)
    # The view references `place`, which references the pins.
    place.pins = pins
    return memoryview(place).cast("B").toreadonly()
