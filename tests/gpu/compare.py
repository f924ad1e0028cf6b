"""The GPU's partial of one case beside PyTorch's: the same in f64, and how long PyTorch takes in bf16.

    compare.py FILE

FILE is what `cuda_check --write` leaves: 512 query rows, 2,048 rows, and o, m, l, all in f32.
"""

import math
import sys

import torch

QUERY_ROWS, ROWS, D_QK, D_V, SCALE = 512, 2048, 576, 512, 0.072


def read(path):
    values = torch.frombuffer(bytearray(open(path, "rb").read()), dtype=torch.float32)
    shapes = [(QUERY_ROWS, D_QK), (ROWS, D_QK), (QUERY_ROWS, D_V), (QUERY_ROWS,), (QUERY_ROWS,)]
    parts = torch.split(values, [math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes)]


def time_us(run):
    """The median of 50 runs on the GPU, after three."""
    times = []
    for repeat in range(53):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def main(path):
    q, rows, o, m, l = read(path)
    scores = (q.double() @ rows.double().T) * SCALE
    want_m = scores.max(dim=1).values
    weights = torch.exp(scores - want_m[:, None])
    want_l = weights.sum(dim=1)
    want_o = weights @ rows[:, :D_V].double() / want_l[:, None]
    off_o = ((o - want_o).norm() / want_o.norm()).item()
    off_m = (m - want_m).abs().max().item()
    off_l = (l.double().log() - want_l.log()).abs().max().item()
    print(f"against PyTorch in f64: o {off_o:.1e} relative, m {off_m:.1e}, ln l {off_l:.1e}")
    if not (off_o <= 1e-2 and off_m <= 1e-2 and off_l <= 1e-2):
        sys.exit("the kernel and PyTorch disagree")

    q, rows = (value.to("cuda", torch.bfloat16) for value in (q, rows))
    value = rows[:, :D_V].contiguous()

    def products():
        weights = torch.softmax((q @ rows.T).float() * SCALE, dim=1).to(torch.bfloat16)
        return weights @ value

    print(f"PyTorch, two products and a softmax in bf16: {time_us(products):.1f} us")
    heads = [v[None, None] for v in (q, rows, value)]
    attention = torch.nn.functional.scaled_dot_product_attention
    print(f"PyTorch, scaled_dot_product_attention: {time_us(lambda: attention(*heads, scale=SCALE)):.1f} us")


if __name__ == "__main__":
    main(sys.argv[1])
