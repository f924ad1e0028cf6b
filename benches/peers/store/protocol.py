"""What every side speaks with `compare.py`: a JSON object a line.

In:  {"what": ..., "bytes": of an object, "batch": objects of a call, "calls": N, "seed": S, "clients": N}
Out: {"seconds": in calls, "latencies_us": [...], "wrong": N, "failed": N}, or {"error": "..."}

`clients` is how many measure at once. Where they are tasks of one process, it answers for all, and says
"objects_s" too.

`what` is one of
  put       puts into the memory of this host
  get       gets of what is there, not read (only where that copies nothing)
  get_copy  gets of what is there, into the caller's memory
  get_far   gets of what only another process's memory holds
  exists    lookups, half of which find something
  put_kept  puts that are over when the disk has them
  get_ssd   gets of what put_kept put with the same seed, each once, in an order of its own
  remove    forgets what put_kept put with the same seed
  clear     forgets everything that any client has put
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
