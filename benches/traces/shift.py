"""Turns a trace into one whose load shifts from prompts to answers, for docs/operate/size.md.

shift.py COPIES TIMES <TRACE >SHIFTED. Until the middle, answers have 64 tokens at most. From then on prompts
are their first two blocks, answers have TIMES their length (4,000 tokens at most), and each request comes
COPIES times, with blocks of its own.
"""

import json
import sys

copies_late, times = int(sys.argv[1]), int(sys.argv[2])
rows = [json.loads(line) for line in sys.stdin]
middle = rows[len(rows) // 2]["timestamp"]
for row in rows:
    ids, answer, copies = row["hash_ids"], row["output_length"], 1
    if row["timestamp"] < middle:
        answer = min(answer, 64)
    else:
        ids, answer, copies = ids[:2], min(answer * times, 4000), copies_late
    length = min(row["input_length"], 512 * len(ids))
    for copy in range(copies):
        ids_of_copy = [id * copies_late + copy for id in ids]
        lengths = {"input_length": length, "output_length": answer}
        print(json.dumps({**row, **lengths, "hash_ids": ids_of_copy}))
