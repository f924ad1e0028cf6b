#!/usr/bin/env python3
"""Extracts the parts of a kernel package that the virtual machine needs.

kernel.py modules TREE TARGET NAME...   copies the modules and their dependencies, numbered in load order
kernel.py vmlinux VMLINUZ TARGET        unpacks the kernel, which would take long on the emulated processor
"""

import lzma
import pathlib
import re
import shutil
import struct
import sys
import zlib


def copy_modules(tree, target, names):
    found = {}
    for path in pathlib.Path(tree).rglob("*.ko"):
        found[path.stem.replace("-", "_")] = path
    ordered = []

    def add(name):
        # A module without a file is built into the kernel.
        if name in ordered or name not in found:
            return
        depends = re.search(rb"\0depends=([^\0]*)\0", found[name].read_bytes())
        for needed in filter(None, depends.group(1).decode().split(",") if depends else []):
            add(needed.replace("-", "_"))
        ordered.append(name)

    for name in names:
        add(name)
    if "rdma_rxe" not in ordered:
        sys.exit(f"{tree} has no rdma_rxe, which all this is about")
    for number, name in enumerate(ordered):
        shutil.copy(found[name], pathlib.Path(target) / f"{number:02}-{name}.ko")


def unpack_kernel(packed, target):
    image = pathlib.Path(packed).read_bytes()
    # Documentation/x86/boot.rst: setup_sects, payload_offset, payload_length.
    setup_sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    payload = image[(setup_sectors + 1) * 512 + offset :][:length]
    if payload.startswith(b"\xfd7zXZ\0"):
        kernel = lzma.LZMADecompressor().decompress(payload)
    elif payload.startswith(b"\x1f\x8b"):
        kernel = zlib.decompressobj(31).decompress(payload)
    else:
        sys.exit(f"{packed} is packed in a way that is not known here: {payload[:6]!r}")
    if not kernel.startswith(b"\x7fELF"):
        sys.exit(f"{packed} does not hold an ELF kernel")
    pathlib.Path(target).write_bytes(kernel)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["modules", tree, target, *names]:
            copy_modules(tree, target, names)
        case ["vmlinux", packed, target]:
            unpack_kernel(packed, target)
        case _:
            sys.exit(__doc__)
