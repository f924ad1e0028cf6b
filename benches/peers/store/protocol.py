"""The protocol between `compare.py` and every side: one JSON object per line.

In:  {"what": ..., "bytes": of an object, "batch": objects of a call, "calls": N, "seed": S, "clients": N}
Out: {"seconds": in calls, "latencies_us": [...], "wrong": N, "failed": N}, or {"error": "..."}

`clients` is the number of concurrent clients. If they are tasks of one process, it answers once for all of them,
with "objects_s".

`what` is one of
  put       puts into the memory of this host
  get       gets of local objects without reading them (only on sides that do not copy)
  get_copy  gets of local objects into the caller's memory
  get_far   gets of objects that only another process has in memory
  exists    lookups, half of which find an object
  put_kept  puts that complete when the objects are on the disk
  get_ssd   gets of the objects of put_kept with the same seed, each once, in another order
  remove    removes the objects of put_kept with the same seed
  clear     removes all objects of all clients
"""

import json
import sys


def serve(measure):
    """Measures points until the input ends."""
    print("READY", flush=True)
    for line in sys.stdin:
        try:
            answer = measure(json.loads(line))
        except Exception as error:  # a peer's failure is a result, not the end of the comparison
            answer = {"error": repr(error)[:300]}
        print("POINT " + json.dumps(answer), flush=True)
