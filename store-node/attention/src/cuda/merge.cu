// Parts of one job, merged.

// What a thread of the merge loads and stores at once: 16 bytes where all rows of parts begin at such.
struct alignas(16) Four {
    float of[4];
};
struct alignas(4) One {
    float of[1];
};
template <bool> struct Values { typedef One Type; };
template <> struct Values<true> { typedef Four Type; };
typedef Values<D_V % 4 == 0>::Type MergeValues;
static constexpr u32 MERGE_VALUES = sizeof(MergeValues) / 4;
static constexpr u32 MERGE_PASSES = (D_V + MERGE_THREADS * MERGE_VALUES - 1) / (MERGE_THREADS * MERGE_VALUES);

// Begins to load this thread's values of parts of consecutive splits, as far as there are such. `from` is where
// the row of the first split lies, `stride_bytes` on that of the next.
template <u32 BATCH>
DEVICE void load_parts(MergeValues (&values)[MERGE_PASSES][BATCH], u64 from, u64 stride_bytes, u32 first, u32 splits) {
    from += first * stride_bytes;
    UNROLL for (u32 i = 0; i < BATCH; i++, from += stride_bytes) {
        if (first + i >= splits) continue;
        UNROLL for (u32 pass = 0; pass < MERGE_PASSES; pass++) {
            u32 value = (pass * MERGE_THREADS + thread_index()) * MERGE_VALUES;
            if (value < D_V) values[pass][i] = load_global<MergeValues>(from + value * 4);
        }
    }
}

// Merges a job's parts, one CTA for query row x of job y. Always in the same order; what has no rows
// changes nothing, and one part alone keeps its bits. Each lane knows of one of 32 splits what it counts.
// BATCH parts, which divides 32, are on their way at a time.
template <u32 BATCH> DEVICE void merge(const Job* jobs, u64 part_o, u64 part_m, u64 part_l) {
    const Job& job = jobs[block_y()];
    u32 query = block_x(), splits = job.splits, query_rows = job.query_rows;
    u64 row = job.part_row + query, to_o = job.o, to_m = job.m, to_l = job.l;
    // Where this CTA has nothing to do too: what follows this launch relies on it.
    wait_for_parts();
    if (splits == 1 || query >= query_rows) return;
    u32 lane = thread_index() % 32;
    u64 from = part_o + row * (D_V * 4), stride_bytes = (u64)query_rows * (D_V * 4);
    MergeValues values[MERGE_PASSES][BATCH] = {};
    load_parts(values, from, stride_bytes, 0, splits);
    float m = minus_infinity();
    float held = 0.0f;
    UNROLL_1 for (u32 first = 0; first < splits; first += 32) {
        u32 split = first + lane;
        u64 at = (row + (u64)(split < splits ? split : 0) * query_rows) * 4;
        float of = load_global<float>(part_l + at), largest = load_global<float>(part_m + at);
        bool holds = split < splits && of > 0.0f;
        m = larger(m, holds ? largest : minus_infinity());
        held += holds ? 1.0f : 0.0f;
    }
    UNROLL for (u32 mask = 16; mask; mask /= 2) {
        m = larger(m, shuffle_xor(m, mask));
        held += shuffle_xor(held, mask);
    }
    float l = 0.0f;
    MergeValues sums[MERGE_PASSES] = {};
    UNROLL_1 for (u32 first = 0; first < splits; first += 32) {
        u32 split = first + lane;
        u64 at = (row + (u64)(split < splits ? split : 0) * query_rows) * 4;
        float of = load_global<float>(part_l + at), largest = load_global<float>(part_m + at);
        bool holds = split < splits && of > 0.0f;
        float share = holds ? of * power_of_2((largest - m) * LOG2_E) : 0.0f;
        l += share;
        u32 end = splits - first < 32 ? splits - first : 32;
        UNROLL_1 for (u32 i = 0; i < end; i += BATCH) {
            UNROLL for (u32 j = 0; j < BATCH; j++) {
                // Beyond the splits it is 0.
                float counts = shuffle(share, i + j);
                UNROLL for (u32 pass = 0; pass < MERGE_PASSES; pass++)
                    UNROLL for (u32 e = 0; e < MERGE_VALUES; e++) {
                        float& sum = sums[pass].of[e];
                        float of = values[pass][j].of[e];
                        float with = held == 1.0f ? of : multiply_add(counts, of, sum);
                        sum = counts > 0.0f ? with : sum;
                    }
            }
            load_parts(values, from, stride_bytes, first + i + BATCH, splits);
        }
    }
    UNROLL for (u32 mask = 16; mask; mask /= 2) l += shuffle_xor(l, mask);
    float inverse = held == 1.0f || !(l > 0.0f) ? 1.0f : 1.0f / l;
    UNROLL for (u32 pass = 0; pass < MERGE_PASSES; pass++) {
        u32 value = (pass * MERGE_THREADS + thread_index()) * MERGE_VALUES;
        if (value >= D_V) continue;
        UNROLL for (u32 e = 0; e < MERGE_VALUES; e++) sums[pass].of[e] *= inverse;
        store_global<MergeValues>(to_o + ((u64)query * D_V + value) * 4, sums[pass]);
    }
    if (thread_index() == 0) {
        store_global<float>(to_m + (u64)query * 4, m);
        store_global<float>(to_l + (u64)query * 4, l);
    }
}

// By how many splits there are: the fewer registers a CTA has, the more CTAs there are at a time.
KERNEL void MERGE_BOUNDS(16) kvasir_merge_4(const Job* jobs, u64 part_o, u64 part_m, u64 part_l) {
    merge<4>(jobs, part_o, part_m, part_l);
}
KERNEL void MERGE_BOUNDS(8) kvasir_merge_8(const Job* jobs, u64 part_o, u64 part_m, u64 part_l) {
    merge<8>(jobs, part_o, part_m, part_l);
}
KERNEL void MERGE_BOUNDS(1) kvasir_merge_16(const Job* jobs, u64 part_o, u64 part_m, u64 part_l) {
    merge<16>(jobs, part_o, part_m, part_l);
}
