"""Puts the C library into the package: `pip install` of this folder needs Rust's cargo, and nothing else.

KVASIR_CLIENT_LIBRARY names one that is built already.
"""

import os
import pathlib
import shutil
import subprocess

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

NAME = "libkvasir_client_c.so"
HERE = pathlib.Path(__file__).resolve().parent


def library():
    given = os.environ.get("KVASIR_CLIENT_LIBRARY")
    if given:
        return pathlib.Path(given)
    crate = HERE.parent / "capi" / "Cargo.toml"
    if not crate.exists():
        raise SystemExit(
            "kvasir-client is built in a checkout of Kvasir; set KVASIR_CLIENT_LIBRARY to a built "
            f"{NAME} to install it from elsewhere"
        )
    root = HERE.parents[2]
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", root / "target")).resolve()
    command = ["cargo", "build", "--release", "--locked", "-p", "kvasir-client-c"]
    subprocess.run([*command, "--target-dir", str(target)], cwd=root, check=True)
    return target / "release" / NAME


class BuildWithLibrary(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.copy2(library(), pathlib.Path(self.build_lib) / "kvasir_client" / NAME)


class OfThisPlatform(Distribution):
    def has_ext_modules(self):
        return True


class Wheel(bdist_wheel):
    """For any Python of this platform: the library is opened by `ctypes`."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": Wheel}, distclass=OfThisPlatform)
