"""Checks out a revision below the target folder and builds the benchmark programs there.

Each revision has a folder of its own with its files (`tree`) and its build (`build`), because benchmarks contain the
absolute paths of the `kvasir` executable and of the models they were compiled with. Both stay for the next comparison.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Cargo's name of each kind of target, and the option that selects one.
SELECT = {"bin": "--bin", "bench": "--bench", "example": "--example"}


class BuildError(Exception):
    """A revision that does not exist, or that does not build."""


@dataclass(frozen=True)
class Program:
    """An executable of the workspace."""

    package: str
    kind: str
    name: str


@dataclass(frozen=True)
class Revision:
    """Files to build: `tree` is the id of a git tree, `folder` the name of its folder, `label` its name in tables."""

    label: str
    folder: str
    tree: str


@dataclass(frozen=True)
class Build:
    """The executables of one revision. A program that the revision lacks is absent from `executables`."""

    revision: Revision
    tree: Path
    executables: dict


def git(root, *arguments, **environment):
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise BuildError(f"`git {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout.strip()


def resolve(root, name):
    """The revision called `name`, or the files of the working tree when `name` is None."""
    if name is None:
        tree = working_tree(root)
        if tree != git(root, "rev-parse", "HEAD^{tree}"):
            return Revision(f"working tree ({tree[:12]})", "working-tree", tree)
        name = "HEAD"
    commit = git(root, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}")
    return Revision(commit[:12], commit[:12], git(root, "rev-parse", f"{commit}^{{tree}}"))


def working_tree(root):
    """The tree of all files that git does not ignore, staged or not. The caller's index does not change."""
    index = Path(root, git(root, "rev-parse", "--git-path", "index"))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "index")
        if index.exists():
            shutil.copy2(index, copy)
        git(root, "add", "--all", GIT_INDEX_FILE=str(copy))
        return git(root, "write-tree", GIT_INDEX_FILE=str(copy))


def check_out(root, folder, tree):
    """Makes `folder/tree` equal to the tree. An unchanged file keeps its time, so that Cargo does not rebuild it."""
    files = folder / "tree"
    files.mkdir(parents=True, exist_ok=True)
    environment = {"GIT_INDEX_FILE": str(folder / "index"), "GIT_WORK_TREE": str(files)}
    git(root, "read-tree", "--reset", "-u", tree, **environment)
    git(root, "checkout-index", "--all", "--force", **environment)
    return files


def copy_dependencies(folder):
    """Starts a first build with the compiled dependencies of an earlier one. Cargo rebuilds those that do not fit."""
    build = folder / "build" / "release"
    if build.exists():
        return
    donors = [donor for donor in folder.parent.glob("*/build/release") if (donor / ".fingerprint").is_dir()]
    if not donors:
        return
    donor = max(donors, key=lambda path: path.stat().st_mtime)
    for part in (".fingerprint", "build", "deps"):
        if (donor / part).is_dir():
            shutil.copytree(donor / part, build / part, ignore=lambda _, names: [n for n in names if "kvasir" in n])


def existing(files, programs):
    """The programs that this revision has, by what Cargo says of its packages."""
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1", "--manifest-path", str(files / "Cargo.toml")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"`cargo metadata` failed:\n{done.stderr}")
    known = {
        Program(package["name"], kind, target["name"])
        for package in json.loads(done.stdout)["packages"]
        for target in package["targets"]
        for kind in target["kind"]
    }
    return [program for program in programs if program in known]


def build(root, compare_dir, revision, programs):
    """Builds the programs of a revision: benchmarks with the profile of `cargo bench`, others with that of users."""
    folder = compare_dir / revision.folder
    files = check_out(root, folder, revision.tree)
    wanted = existing(files, programs)
    copy_dependencies(folder)
    print(f"building {revision.label} in {folder}", file=sys.stderr, flush=True)
    executables = {}
    for profile, part in steps(wanted):
        executables.update(compile_programs(files, folder / "build", revision, profile, part))
    return Build(revision, files, executables)


def steps(programs):
    """The profile and the programs of each call of Cargo, in order.

    Benchmarks start `kvasir` where Cargo puts it, and every call that builds it overwrites it. The last call builds it as
    users do: with the release profile, and without examples, whose dev-dependencies would turn on further features.
    """
    profiles = [("bench", "bench"), ("example", "release"), ("bin", "release")]
    calls = [(profile, [program for program in programs if program.kind == kind]) for kind, profile in profiles]
    return [(profile, part) for profile, part in calls if part]


def compile_programs(files, target_dir, revision, profile, programs):
    """Compiles programs with a profile of Cargo. Returns their executables."""
    command = ["cargo", "build", "--profile", profile, "--locked", "--message-format", "json-render-diagnostics"]
    for package in sorted({program.package for program in programs}):
        command += ["--package", package]
    for program in programs:
        command += [SELECT[program.kind], program.name]
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target_dir)}
    done = subprocess.run(command, cwd=files, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise BuildError(f"{revision.label} does not build")
    built = {}
    for line in done.stdout.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("reason") == "compiler-artifact" and message.get("executable"):
            target = message["target"]
            built[target["kind"][0], target["name"]] = Path(message["executable"])
    return {program: built[program.kind, program.name] for program in programs}
