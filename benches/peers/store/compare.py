"""Gives every side its turn at each point, round by round, and prints medians and ratios as Markdown."""

import argparse
import ctypes
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
KIB, MIB = 1 << 10, 1 << 20
# Bytes of an object, objects of a batch.
SIZES = [(128 * KIB, 32), (1 * MIB, 16), (4 * MIB, 8)]
MEMORY_BYTES = 1 << 30
# Memory of each Mooncake Store process that holds objects. It must hold the objects of one sample, because the store
# refuses puts while its objects were recently read.
MOONCAKE_BYTES = 2 << 30
SSD_MEMORY_BYTES = 256 * MIB
# Objects written to the disk in one round.
SSD_BYTES = 768 * MIB
LOOKUP_KEYS = 1000
IDLE_WANTED = 0.85


PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def ends_with_parent():
    """The process that calls this ends when its parent ends, even if the parent is killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """One that speaks lines."""

    def __init__(self, command):
        quiet = {**os.environ, "GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR", "RUST_LOG": "error"}
        quiet["PYTHONHASHSEED"] = "0"
        self.command = command
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=quiet,
            preexec_fn=ends_with_parent,
        )

    def hear(self, word):
        for line in self.child.stdout:
            if line.startswith(word):
                return line[len(word) :].strip()
        raise RuntimeError(f"{' '.join(self.command)} has ended")

    def ask(self, point):
        self.child.stdin.write(json.dumps(point) + "\n")
        self.child.stdin.flush()

    def pause(self, pauses):
        self.child.send_signal(signal.SIGSTOP if pauses else signal.SIGCONT)

    def stop(self):
        self.pause(False)
        self.child.stdin.close()
        try:
            self.child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


class Side:
    """`clients` are measuring processes, or one process for several clients. `others` are the processes that they need,
    in the order in which they are stopped. A side that `spins` while idle is suspended outside its turn. With `clear`
    the side forgets all objects before each sample."""

    def __init__(self, name, clients, others=(), points=(), spins=False, clear=False):
        self.name, self.clients, self.others, self.points = name, clients, list(others), set(points)
        self.spins, self.clear = spins, clear
        self.pause(True)

    def pause(self, pauses):
        if self.spins:
            for client in self.clients:
                client.pause(pauses)

    def stop(self):
        for process in [*self.clients, *self.others]:
            process.stop()


def started(command, word="READY"):
    process = Process(command)
    return process, process.hear(word)


def kvasir(binary, bytes_, folder, ssd):
    dir_ = tempfile.mkdtemp(dir=folder)
    near, _ = started([binary, "node", "near", dir_, str(MEMORY_BYTES)])
    far, address = started([binary, "node", "far", dir_, str(MEMORY_BYTES)])
    client = [binary, "client"]
    clients = [started([*client, str(n), str(bytes_), f"{dir_}/near", f"{dir_}/far", address])[0] for n in range(2)]
    sides = [Side("kvasir", clients, [near, far], ["put", "get", "get_copy", "get_far", "exists"])]
    if ssd:
        disk, address = started([binary, "node", "disk", dir_, str(SSD_MEMORY_BYTES), tempfile.mkdtemp(dir=ssd)])
        clients = [started([*client, str(n), str(bytes_), f"{dir_}/disk", f"{dir_}/disk", address])[0] for n in range(2)]
        sides.append(Side("kvasir", clients, [disk], ["get_ssd"]))
    return sides


class Master:
    """Mooncake's, which speaks no lines."""

    def __init__(self, binary):
        self.address = f"127.0.0.1:{free_port()}"
        port = self.address.rsplit(":", 1)[1]
        self.child = subprocess.Popen(
            [binary, f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=ends_with_parent,
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(port)), 0.2).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def stop(self):
        self.child.kill()
        self.child.wait()


def mooncake(python):
    side = [python, f"{HERE}/mooncake_side.py"]
    master_binary = os.path.join(os.path.dirname(python), "mooncake_master")
    sides = []
    master = Master(master_binary)
    near = [started([*side, "client", str(n), master.address, str(MOONCAKE_BYTES)])[0] for n in range(2)]
    sides.append(Side("mooncake-store", near, [master], ["put", "get_copy", "exists"], clear=True))
    master = Master(master_binary)
    storage, _ = started([*side, "storage", master.address, str(MOONCAKE_BYTES)])
    far = [started([*side, "client", str(n), master.address, "0"])[0] for n in range(2)]
    sides.append(Side("mooncake-store", far, [storage, master], ["get_far"], clear=True))
    return sides


def foyer(binary, ssd):
    sides = []
    for io, flush in (("psync", []), ("io_uring", []), ("psync", ["sync"]), ("io_uring", ["sync"])):
        client, _ = started([binary, tempfile.mkdtemp(dir=ssd), io, *flush])
        name = "-".join(["foyer", io, *flush])
        measured = ["get_ssd"] if flush else ["get_ssd", "get"]
        # Its io_uring polls also when nothing is asked for.
        sides.append(Side(name, [client], [], measured, spins=True))
    return sides


def limits(binary, bytes_):
    clients = [started([binary, "limits", str(bytes_)])[0] for _ in range(2)]
    return [Side("plain loop", clients, [], ["put", "get_copy", "get_far"])]


def points(bytes_, batch):
    """The points, each with its number of clients."""
    some = max(24, (192 * MIB) // bytes_)
    for clients in (1, 2):
        yield {"what": "put", "batch": batch, "calls": max(6, 512 * MIB // bytes_ // batch)}, clients
        yield {"what": "get", "batch": 1, "calls": max(500, min(5000, 2048 * MIB // bytes_))}, clients
        yield {"what": "get_copy", "batch": 1, "calls": some}, clients
        yield {"what": "get_far", "batch": 1, "calls": some}, clients
        yield {"what": "get_far", "batch": batch, "calls": max(3, some // batch)}, clients
        if bytes_ == SIZES[0][0]:
            yield {"what": "exists", "batch": LOOKUP_KEYS, "calls": 50}, clients
    for clients in (1, 2):
        objects = SSD_BYTES // bytes_ // clients
        for batch_ in (1, batch):
            yield {"what": "get_ssd", "batch": batch_, "calls": objects // batch_}, clients


def busy_and_all():
    with open("/proc/stat") as stat:
        ticks = list(map(int, stat.readline().split()[1:9]))
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def wait_until_quiet(patience_s):
    """The share of the machine that was idle before the sample, after some patience."""
    deadline = time.monotonic() + patience_s
    while True:
        busy, all_ = busy_and_all()
        time.sleep(0.2)
        busy_now, all_now = busy_and_all()
        idle = 1 - (busy_now - busy) / max(1, all_now - all_)
        if idle >= IDLE_WANTED or time.monotonic() > deadline:
            return idle


def measure(side, point, clients):
    """All clients at once; rates add up, and latencies are of all."""
    asked = side.clients[:clients]
    point = {**point, "clients": clients}
    side.pause(False)
    if side.clear:
        side.clients[0].ask({**point, "what": "clear"})
        side.clients[0].hear("POINT")
    for client in asked:
        client.ask(point)
    answers = [None] * len(asked)

    def hear(at):
        answers[at] = json.loads(asked[at].hear("POINT"))

    threads = [threading.Thread(target=hear, args=(at,)) for at in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    side.pause(True)
    if any(answer is None or "error" in answer for answer in answers):
        raise RuntimeError(f"{side.name}: {answers}")
    rates = (one.get("objects_s") or len(one["latencies_us"]) * point["batch"] / one["seconds"] for one in answers)
    return {
        "objects_s": sum(rates),
        "latencies_us": sorted(us for one in answers for us in one["latencies_us"]),
        "wrong": sum(one["wrong"] for one in answers),
        "failed": sum(one["failed"] for one in answers),
    }


def quantile(ordered, share):
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def fio(folder, bytes_, depth, in_batches=False):
    """The bytes per second of random reads by fio, without the page cache. `depth` reads are always in flight. With
    `in_batches`, all of them complete before the next ones start, as with batch calls."""
    engine = ["--ioengine=io_uring", f"--iodepth={depth}"] if depth > 1 else ["--ioengine=psync"]
    if in_batches:
        engine += [f"--iodepth_batch_submit={depth}", f"--iodepth_batch_complete_min={depth}"]
    command = ["fio", "--name=read", f"--filename={folder}/fio", "--size=1g", "--rw=randread", f"--bs={bytes_}",
               "--direct=1", "--runtime=4", "--time_based", "--output-format=json", *engine]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"]


def compare(sides, bytes_, batch, rounds, wanted, samples):
    """Every side at every point, in turns."""
    seed = 0
    for what, clients in points(bytes_, batch):
        point = {"bytes": bytes_, **what}
        if wanted and point["what"] not in wanted:
            continue
        # Before gets from the disk, the objects are put there. Afterwards they are removed.
        put = {**point, "what": "put_kept", "batch": batch, "calls": SSD_BYTES // bytes_ // clients // batch}
        steps = [put, point, {**put, "what": "remove"}] if point["what"] == "get_ssd" else [point]
        of_steps = [{} for _ in steps]
        for round_ in range(rounds + 1):
            seed += 1
            for side in sides:
                if point["what"] not in side.points:
                    continue
                for step, of_step in zip(steps, of_steps):
                    samples["idle"].append(wait_until_quiet(samples["patience_s"]))
                    try:
                        answer = measure(side, {**step, "seed": seed}, clients)
                    except RuntimeError as error:
                        print(error, file=sys.stderr)
                        continue
                    samples["wrong"] += answer["wrong"]
                    # The first round warms connections and caches.
                    if round_ > 0:
                        of_step.setdefault(side.name, []).append(answer)
        for step, of_step in zip(steps, of_steps):
            if step["what"] != "remove":
                report(step, clients, of_step, samples)


def report(point, clients, of_point, samples):
    what = f"{point['what']}, {point['bytes'] // KIB:,} KiB, {point['batch']} a call, {clients} client{'s'[:clients - 1]}"
    print(f"\n### {what}\n\n| side | GB/s | objects/s | p50 us | p99 us | failed |\n| --- | --- | --- | --- | --- | --- |")
    for name, answers in of_point.items():
        rate = statistics.median(one["objects_s"] for one in answers)
        p50 = statistics.median(quantile(one["latencies_us"], 0.5) for one in answers)
        p99 = statistics.median(quantile(one["latencies_us"], 0.99) for one in answers)
        failed = sum(one["failed"] for one in answers)
        copied = "" if point["what"] in ("get", "exists") else f"{rate * point['bytes'] / 1e9:.3f}"
        print(f"| {name} | {copied} | {rate:,.0f} | {p50:.1f} | {p99:.1f} | {failed} |", flush=True)
        row = {"point": what, "side": name, "objects_s": rate, "p50_us": p50, "p99_us": p99, "failed": failed}
        samples["rows"].append(row)


def main():
    # SIGTERM also stops the started processes and removes the folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--foyer", required=True)
    parser.add_argument("--mooncake-python", required=True)
    parser.add_argument("--disk", required=True, help="a folder on the disk that is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=20, help="seconds to wait for a quiet machine before a sample")
    parser.add_argument("--sides", help="of kvasir,mooncake-store,foyer,plain; all of them by default")
    parser.add_argument("--sizes", help="bytes of objects; 131072,1048576,4194304 by default")
    parser.add_argument("--what", help="points, as protocol.py names them; all of them by default; put_kept is part of get_ssd")
    parser.add_argument("--json", help="where to write the medians")
    arguments = parser.parse_args()
    names = (arguments.sides or "kvasir,mooncake-store,foyer,plain").split(",")
    wanted = arguments.what.split(",") if arguments.what else None
    sizes = [int(size) for size in arguments.sizes.split(",")] if arguments.sizes else [size for size, _ in SIZES]
    unknown = [size for size in sizes if size not in dict(SIZES)]
    if unknown:
        sys.exit(f"sizes are of {', '.join(str(size) for size, _ in SIZES)}, and not {unknown}")
    samples = {"idle": [], "wrong": 0, "rows": [], "patience_s": arguments.patience}
    on_disk = wanted is None or "get_ssd" in wanted
    with_foyer = "foyer" in names and (on_disk or "get" in wanted)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=arguments.disk) as disk:
        for bytes_ in sizes:
            sides = []
            try:
                if "plain" in names:
                    sides += limits(arguments.binary, bytes_)
                if "kvasir" in names:
                    sides += kvasir(arguments.binary, bytes_, folder, disk if on_disk else None)
                if "mooncake-store" in names:
                    sides += mooncake(arguments.mooncake_python)
                if with_foyer:
                    sides += foyer(arguments.foyer, disk)
                compare(sides, bytes_, dict(SIZES)[bytes_], arguments.rounds, wanted, samples)
            finally:
                for side in sides:
                    side.stop()
            if on_disk and shutil.which("fio"):
                batch = dict(SIZES)[bytes_]
                for depth, in_batches in ((1, False), (batch, False), (batch, True)):
                    read = fio(disk, bytes_, depth, in_batches) / 1e9
                    what = f"{depth} at once{', and as many again when all have come' if in_batches else ''}"
                    print(f"\nfio, random reads of {bytes_ // KIB:,} KiB, {what}: {read:.3f} GB/s", flush=True)
    quiet = sum(idle >= IDLE_WANTED for idle in samples["idle"]) / max(1, len(samples["idle"]))
    print(f"\n{quiet:.0%} of the samples began on a machine that was {IDLE_WANTED:.0%} idle; wrong objects: {samples['wrong']}")
    if arguments.json:
        with open(arguments.json, "w") as out:
            json.dump(samples["rows"], out, indent=1)
    sys.exit(1 if samples["wrong"] else 0)


if __name__ == "__main__":
    main()
