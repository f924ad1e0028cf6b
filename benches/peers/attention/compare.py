"""Partial attention over 2,048 latent rows in bf16 beside PyTorch, on one thread, in turns.

    benches/peers/attention/run [--rounds N] [--batches 1,4,16]

PyTorch computes the same problem two ways: products of matrices with a softmax between them, written
so that o, m and l come out, and scaled_dot_product_attention, which gives o alone. Hot means the same
rows again and again, cold rows that were not read for a while. The best of all rounds counts; the two
programs take turns, so that a machine that slows down slows both.
"""

import argparse
import subprocess
import time

import torch

ROWS, WIDTH, VALUE, SETS = 2048, 576, 512, 96
SCALE = 0.072


def products(q, rows):
    logits = (q @ rows.T).float() * SCALE
    m = logits.amax(-1)
    p = torch.exp(logits - m[:, None])
    l = p.sum(-1)
    o = (p.to(torch.bfloat16) @ rows[:, :VALUE]).float() / l[:, None]
    return o, m, l


def fused(q, rows):
    return torch.nn.functional.scaled_dot_product_attention(
        q[None, None], rows[None, None], rows[None, None, :, :VALUE], scale=SCALE)


def best_us(run, q, memory, times):
    """(hot, cold) in microseconds."""
    hot = cold = float("inf")
    for round_ in range(times):
        rows = memory[round_ * 7 % SETS]
        for again in range(4):
            begun = time.perf_counter()
            run(q, rows)
            took = (time.perf_counter() - begun) * 1e6
            if again == 0:
                cold = min(cold, took)
            else:
                hot = min(hot, took)
    return hot, cold


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--binary", required=True)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--batches", default="1,4")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    memory = (torch.rand(1, ROWS, WIDTH) * 2 - 1).to(torch.bfloat16).repeat(SETS, 1, 1)
    print(f"PyTorch {torch.__version__}, one thread, best of {options.rounds} rounds in turns; us, hot / cold.\n")
    print("| heads | batch | kvasir | PyTorch, products | PyTorch, fused | hot, products over kvasir |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for heads in (16, 128):
        for batch in map(int, options.batches.split(",")):
            q = (torch.rand(heads * batch, WIDTH) * 2 - 1).to(torch.bfloat16)
            worst = (float("inf"), float("inf"))
            ours, plain, sdpa = worst, worst, worst
            both = lambda a, b: (min(a[0], b[0]), min(a[1], b[1]))
            times = 12 if heads * batch < 512 else 3
            for _ in range(options.rounds):
                out = subprocess.run([options.binary, "--case", str(heads), str(batch)],
                                     check=True, capture_output=True, text=True).stdout
                ours = both(ours, tuple(map(float, out.split())))
                plain = both(plain, best_us(products, q, memory, times))
                sdpa = both(sdpa, best_us(fused, q, memory, max(times // 3, 1)))
            cell = lambda pair: f"{pair[0]:.0f} / {pair[1]:.0f}"
            print(f"| {heads} | {batch} | {cell(ours)} | {cell(plain)} | {cell(sdpa)} | {plain[0] / ours[0]:.1f} |")


if __name__ == "__main__":
    main()
