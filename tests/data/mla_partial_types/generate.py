#!/usr/bin/env python3
"""Reference vectors for partial attention over rows in f16 and in DeepSeek's fp8 latents, in float64.

    python generate.py OUT_DIR [SEED]        needs: numpy ml_dtypes safetensors

The definitions are those of ../mla_partial/generate.py, and so are the tensors of a file, but for the
rows:
    ckv      f16 [tokens, d_qk], with q in f16 too
    ckv      u8  [tokens, 656]: 512 values of e4m3, the scales of four groups of 128 in f32, little
             endian, then 64 rotated values in bf16; with q in bf16. A value is its e4m3 times its
             group's scale. Rows are drawn in float32 and quantised with scale = largest / 448 of
             the group. The computation in float64 starts from the stored values.
"""
import os
import sys

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

LATENT, GROUP, ROPE = 512, 128, 64


def quantise(rows):
    """Rows [tokens, 576] in float32 -> (bytes [tokens, 656], the stored values in float64)."""
    tokens = rows.shape[0]
    groups = rows[:, :LATENT].reshape(tokens, LATENT // GROUP, GROUP)
    scales = (np.abs(groups).max(-1) / 448.0).astype(np.float32)
    latent = (groups / scales[..., None]).astype(ml_dtypes.float8_e4m3fn)
    rope = rows[:, LATENT:].astype(ml_dtypes.bfloat16)
    packed = np.concatenate([
        latent.reshape(tokens, LATENT).view(np.uint8),
        np.ascontiguousarray(scales).view(np.uint8),
        np.ascontiguousarray(rope).view(np.uint8),
    ], axis=1)
    assert packed.shape == (tokens, 656)
    values = (latent.astype(np.float64) * scales.astype(np.float64)[..., None]).reshape(tokens, LATENT)
    return packed, np.concatenate([values, rope.astype(np.float64)], axis=1)


def partial(q, k, d_v, scale, rows):
    """One query [heads, d_qk] over the rows named: (o, m, l) in float64."""
    heads = q.shape[0]
    if len(rows) == 0:
        return np.zeros((heads, d_v)), np.full(heads, -np.inf), np.zeros(heads)
    logits = scale * (q @ k[rows].T)
    m = logits.max(-1)
    p = np.exp(logits - m[:, None])
    l = p.sum(-1)
    return (p @ k[rows][:, :d_v]) / l[:, None], m, l


def case(rng, name, dtype, queries, heads, tokens, d_qk, d_v, holders, k=None, spread=1.0):
    q = rng.standard_normal((queries, heads, d_qk)) * spread
    rows = rng.standard_normal((tokens, d_qk)).astype(np.float32)
    if dtype == "f16":
        q, ckv = q.astype(np.float16), rows.astype(np.float16)
        k64 = ckv.astype(np.float64)
    else:
        # Groups of very different size, so that a scale that is mixed up shows.
        rows[:, :LATENT] *= np.repeat([1.0, 0.25, 2.0, 0.5], GROUP).astype(np.float32)
        q = q.astype(ml_dtypes.bfloat16)
        ckv, k64 = quantise(rows)
    scale = 1.0 / np.sqrt(192.0)
    split = rng.integers(0, holders, tokens).astype(np.int32)
    seen = [np.arange(tokens)] * queries
    out = {}
    if k is not None:
        index = np.stack([rng.permutation(tokens)[:k] for _ in range(queries)]).astype(np.int32)
        index[0, k // 2:] = -1
        seen = [row[row >= 0] for row in index]
        out["index"] = index

    def over(keep):
        parts = [partial(q[i].astype(np.float64), k64, d_v, scale, rows[keep[rows]]) for i, rows in enumerate(seen)]
        return [np.stack(x).astype(np.float32) for x in zip(*parts)]

    out["o"], out["m"], out["l"] = over(np.ones(tokens, bool))
    parts = [over(split == holder) for holder in range(holders)]
    out["part_o"], out["part_m"], out["part_l"] = (np.stack(x) for x in zip(*parts))
    out.update(q=q, ckv=ckv, split=split)
    return out, dict(scale=repr(float(scale)), holders=str(holders), case=name)


CASES = [
    dict(name="f16_decode_h16", dtype="f16", queries=1, heads=16, tokens=150, d_qk=576, d_v=512, holders=2),
    dict(name="f16_narrow", dtype="f16", queries=3, heads=5, tokens=97, d_qk=83, d_v=61, holders=3),
    dict(name="f16_selected", dtype="f16", queries=3, heads=4, tokens=120, d_qk=144, d_v=128, holders=4, k=32),
    dict(name="fp8_decode_h16", dtype="fp8", queries=1, heads=16, tokens=300, d_qk=576, d_v=512, holders=2),
    dict(name="fp8_batch", dtype="fp8", queries=3, heads=7, tokens=131, d_qk=576, d_v=512, holders=3, spread=2.0),
    dict(name="fp8_selected", dtype="fp8", queries=3, heads=8, tokens=200, d_qk=576, d_v=512, holders=2, k=48),
]

if __name__ == "__main__":
    out_dir = sys.argv[1]
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 20261122
    os.makedirs(out_dir, exist_ok=True)
    for i, c in enumerate(CASES):
        tensors, meta = case(np.random.default_rng([seed, i]), **c)
        path = os.path.join(out_dir, c["name"] + ".safetensors")
        save_file(tensors, path, metadata=meta)
        print(f"{c['name']:20s} {os.path.getsize(path) / 1e3:6.0f} kB")
