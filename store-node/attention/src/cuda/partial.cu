// Partial attention of absorbed MLA on tensor cores (Flash-Decoding, arXiv 2205.14135 and its split over
// rows), over cached rows in the slots where they lie.
//
// For query row i and the cached rows t that it attends, with q_i of D_QK values, k_t a cached row and
// v_t its first D_V values:
//
//     s_it = scale * <q_i, k_t>    m_i = max_t s_it    l_i = sum_t exp(s_it - m_i)
//     o_i  = sum_t exp(s_it - m_i) * v_t / l_i
//
// One CTA takes one `Work`: up to 64 query rows against a range of cached rows, ROWS at a time. 8 of its
// warps attend. They stand in groups that share query rows; a group's parties each have the scores of some
// of the cached rows, and some of the outputs. By `mma`, there are 2 groups of 32 query rows, and each of a
// group's 4 warps is a party; all copy the next tile before they attend one. By `wgmma` (sm_90a), which
// reads all from shared memory, there is 1 group, and its 2 warpgroups are the parties; a third one copies
// tiles meanwhile. Where a job's rows are split over CTAs, each leaves a partial, and `kvasir_merge_4` or one of
// its like merges them.

static constexpr float LOG2_E = 1.44269504088896340736f;
DEVICE float minus_infinity() { return float_of_bits(0xff800000u); }

// Where a tile has the 16 bytes that are part `part` of a row, counted over all columns.
template <u32 TILE_ROWS> DEVICE u32 tile_at(u32 row, u32 part) {
    return part / 8 * (TILE_ROWS * LINE_BYTES) + row * LINE_BYTES + ((part % 8) ^ (row & 7)) * 16;
}

// The same of the weights, which are one column of ROWS values: of 128 bytes a row, or of 64.
DEVICE u32 weights_at(u32 row, u32 part) {
    return WEIGHTS_AT + (ROWS == 64 ? row * 128 + (part ^ (row & 7)) * 16
                                    : row * 64 + (part ^ (row >> 1 & 3)) * 16);
}

// Bytes of a row's 16-byte part that the row has.
DEVICE u32 part_bytes(u32 row_bytes, u32 part) {
    u32 from = part * 16;
    return from >= row_bytes ? 0 : (row_bytes - from < 16 ? row_bytes - from : 16);
}

// The first of a CTA's threads attend; the last ones copy.
DEVICE u32 copy_index() { return thread_index() - (THREADS - COPYING); }

static constexpr u32 NO_ROW = 0xffffffffu;

// What of a job says where rows lie, in registers.
struct List {
    u64 pages, selected;
    u64 nowhere;  // an address of which nothing is read
    u32 page_rows, rows_per_page, row_stride_bytes;
};

DEVICE List list_of(const Job& job) {
    return {job.pages, job.selected, job.query, job.page_rows, job.rows_per_page, job.row_stride_bytes};
}

// The rows that this thread copies a part of, of the tile that begins at `first`, as the list has them.
DEVICE void pick(u32 (&rows)[COPY_PASSES], const List& list, u32 first, u32 row_end) {
    UNROLL for (u32 pass = 0; pass < COPY_PASSES; pass++) {
        u32 at = first + pass * COPY_ROWS + copy_index() / COPY_LANES;
        rows[pass] = list.selected  ? load_global_where(at < row_end, list.selected + (u64)at * 4, NO_ROW)
                     : at < row_end ? at
                                    : NO_ROW;
    }
}

// Where rows lie: 0 where there is none, or its page and which row of it.
struct Places {
    u64 pages[COPY_PASSES];
    u32 rows[COPY_PASSES];
};

DEVICE void place(Places& places, const List& list, const u32 (&rows)[COPY_PASSES]) {
    UNROLL for (u32 pass = 0; pass < COPY_PASSES; pass++) {
        u32 page = rows[pass] / list.rows_per_page;
        places.rows[pass] = rows[pass] - page * list.rows_per_page;
        places.pages[pass] = load_address_where(rows[pass] < list.page_rows, list.pages + (u64)page * 8);
    }
}

// This lane's parts of a row to a tile; beyond the row's bytes zeros.
template <u32 TILE_ROWS> DEVICE void copy_row(u32 tile, u32 row, u64 from, u32 row_bytes, u32 columns) {
    u32 lane = thread_index() % COPY_LANES;
    u32 to = tile + tile_at<TILE_ROWS>(row, lane);
    from += lane * 16;
    UNROLL for (u32 column = 0; column < columns; column++) {
        u32 bytes = D_QK % 64 == 0 && column < QUERY_COLUMNS ? (row_bytes ? 16 : 0)
                                                             : part_bytes(row_bytes, column * 8 + lane);
        // Where nothing is read there is nothing but the row's beginning.
        u64 at = D_QK % 64 == 0 || bytes ? from + column * LINE_BYTES : from - lane * 16;
        copy_16(to + column * (TILE_ROWS * LINE_BYTES), at, bytes);
    }
}

// Begins to copy rows of a tile, in passes; those that are none become zero, and are noted as not attended.
template <u32 FIRST = 0, u32 END = COPY_PASSES>
DEVICE void copy_rows(const List& list, const Places& places, u32 stage) {
    UNROLL for (u32 pass = FIRST; pass < END; pass++) {
        u32 row = pass * COPY_ROWS + copy_index() / COPY_LANES;
        bool is_row = places.pages[pass] != 0;
        u64 from = is_row ? places.pages[pass] + (u64)places.rows[pass] * list.row_stride_bytes : list.nowhere;
        u32 row_bytes = is_row ? ROW_BYTES : 0;
        u32 lanes = which_lanes(is_row);
        if (thread_index() % 32 == 0) {
            u32 four = (lanes & 1) | (lanes >> 7 & 2) | (lanes >> 14 & 4) | (lanes >> 21 & 8);
            store_shared<u8>(ATTENDED_AT + stage * ATTENDED_BYTES + row / 4, (u8)four);
        }
#if DTYPE == FP8
        u32 lane = copy_index() % COPY_LANES;
        UNROLL for (u32 part = lane; part < FP8_ROW_BYTES / 16; part += COPY_LANES)
            copy_16(RAW_AT + row * FP8_ROW_BYTES + part * 16, from + part * 16, row_bytes ? 16 : 0);
#else
        copy_row<ROWS>(TILES_AT + stage * TILE_BYTES, row, from, row_bytes, COLUMNS);
#endif
    }
}

DEVICE void copy_query(const Job& job, u32 query_first) {
    UNROLL for (u32 pass = 0; pass < QUERIES / QUERY_COPY_ROWS; pass++) {
        u32 row = pass * QUERY_COPY_ROWS + thread_index() / COPY_LANES;
        bool is_there = query_first + row < job.query_rows;
        u64 from = job.query + (is_there ? (u64)(query_first + row) * job.query_stride_bytes : 0);
        copy_row<QUERIES>(QUERY_AT, row, from, is_there ? QUERY_ROW_BYTES : 0, QUERY_COLUMNS);
    }
}

#if DTYPE == FP8
// Two values of e4m3, in the upper bytes of the halves, as bf16, exactly. Sign, exponent and fraction
// are moved to where bf16 has them, whose exponent then is 120 too small; all ones is no number.
DEVICE u32 widen_e4m3(u32 halves) {
    u32 magnitude = halves & 0x7f007f00u;
    u32 is_nan = ((magnitude + 0x01000100u) >> 15 & 0x00010001u) * 0x7fffu;
    return multiply_bf16x2((halves & 0x80008000u) | magnitude >> 4, 0x7b807b80u) | is_nan;
}

// From the bytes as they came to a tile of bf16, scales left out, and the scales beside it.
DEVICE void widen_rows() {
    u32 lane = thread_index() % COPY_LANES;
    UNROLL for (u32 pass = 0; pass < COPY_PASSES; pass++) {
        u32 row = pass * COPY_ROWS + thread_index() / COPY_LANES;
        u32 raw = RAW_AT + row * FP8_ROW_BYTES;
        if (lane < FP8_GROUPS)
            store_shared<u32>(SCALES_AT + (lane * ROWS + row) * 4,
                              load_shared<u32>(raw + FP8_SCALES_AT + lane * 4));
        UNROLL for (u32 part = lane; part < FP8_SCALES_AT / 8; part += COPY_LANES) {
            u32 to = TILES_AT + tile_at<ROWS>(row, part);
            UNROLL for (u32 word = 0; word < 2; word++) {
                u32 four = load_shared<u32>(raw + part * 8 + word * 4);
                u32 low = (four & 0xffu) << 8 | (four & 0xff00u) << 16;
                u32 high = (four & 0xff0000u) >> 8 | (four & 0xff000000u);
                store_shared<u32>(to + word * 8, widen_e4m3(low));
                store_shared<u32>(to + word * 8 + 4, widen_e4m3(high));
            }
        }
        u32 to = TILES_AT + tile_at<ROWS>(row, FP8_SCALES_AT / 8 + lane);
        UNROLL for (u32 word = 0; word < 4; word++)
            store_shared<u32>(to + word * 4,
                              load_shared<u32>(raw + FP8_ROPE_AT + lane * 16 + word * 4));
    }
}
#endif

#if WGMMA
DEVICE u32 own_group() { return 0; }
DEVICE u32 own_party() { return thread_index() / 128; }
#else
DEVICE u32 own_group() { return thread_index() / 128; }
DEVICE u32 own_party() { return thread_index() / 32 % 4; }
#endif

typedef float Scores[M_TILES][S_TILES][4];
typedef float Outputs[M_TILES][O_TILES][4];

#if WGMMA
// Where `wgmma` finds a matrix: in lines of 128 bytes that are swapped as tiles have them. Eight lines
// are a block; `stride` bytes on is the next block of lines, and `leading` bytes on the next column.
DEVICE u64 matrix_at(u32 at, u32 leading, u32 stride) {
    return (u64)((shared_address(at) & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 |
           1ull << 62;
}

// How much is added to it for a matrix so many bytes on.
DEVICE u64 matrix_offset(u32 bytes) { return bytes >> 4; }
static constexpr u32 BLOCK_BYTES = 8 * LINE_BYTES;

// The first values of this warp's query rows: every one that products find in registers is one less that they
// read from shared memory, whose rate limits them.
typedef u32 Queries[KEPT_STEPS][4];

DEVICE void keep_queries(Queries& q) {
    u32 lane = thread_index() % 32, row = thread_index() / 32 % 4 * 16 + lane % 16;
    UNROLL for (u32 step = 0; step < KEPT_STEPS; step++)
        load_matrices(q[step], QUERY_AT + tile_at<QUERIES>(row, step * 2 + lane / 16));
}

// Begins the products of all query rows with the cached rows of this warpgroup.
DEVICE void scores_begin(Scores& s, const Queries& q, u32 tile) {
    u64 a = matrix_at(QUERY_AT, 16, BLOCK_BYTES);
    u64 b = matrix_at(of_warp(tile) + of_warp(own_party()) * (ROWS / PARTIES) * LINE_BYTES, 16, BLOCK_BYTES);
    forget(a);
    forget(b);
    products_begin();
    UNROLL for (u32 step = 0; step < K_STEPS; step++) {
        u32 column = step / 4, within = step % 4 * 32;
        u64 rows = b + matrix_offset(column * COLUMN_BYTES + within);
        if (step < KEPT_STEPS)
            multiply_32(*(float(*)[16])&s, q[step < KEPT_STEPS ? step : 0], rows, step > 0);
        else
            multiply_32(*(float(*)[16])&s, a + matrix_offset(column * QUERY_COLUMN_BYTES + within), rows, step > 0);
    }
    products_end_group();
}

// Begins to add the weighted values of a party's rows of a tile to this warpgroup's outputs.
DEVICE void add_values_begin(Outputs& o, u32 tile, u32 party) {
    u64 a = matrix_at(WEIGHTS_AT, 16, BLOCK_BYTES);
    u32 columns = of_warp(tile) + of_warp(own_party()) * (O_COLUMNS / 64) * COLUMN_BYTES;
    u64 b = matrix_at(columns, COLUMN_BYTES, BLOCK_BYTES);
    products_begin();
    UNROLL for (u32 i = 0; i < T_STEPS / PARTIES; i++) {
        u32 step = party * (T_STEPS / PARTIES) + i;
        multiply_256(*(float(*)[128])&o, a + matrix_offset(step * 32),
                     b + matrix_offset(step * 16 * LINE_BYTES), true);
    }
    products_end_group();
}
#else
// Adds the products of this warp's query rows with its cached rows over 16 values.
DEVICE void score_step(Scores& s, u32 tile, u32 step) {
    u32 lane = thread_index() % 32;
    u32 a[M_TILES][4];
    UNROLL for (u32 mt = 0; mt < M_TILES; mt++) {
        u32 row = own_group() * GROUP_QUERIES + mt * 16 + lane % 16;
        load_matrices(a[mt], QUERY_AT + tile_at<QUERIES>(row, step * 2 + lane / 16));
    }
    u32 part = step * 2 + lane / 8 % 2;
    u32 b[S_TILES * 2];
    if constexpr (S_TILES == 2) {
        u32 row = own_party() * 16 + lane % 8 + lane / 16 * 8;
        load_matrices(*(u32(*)[4])&b, tile + tile_at<ROWS>(row, part));
    } else {
        u32 row = own_party() * 8 + lane % 8;
        load_two_matrices(b[0], b[1], tile + tile_at<ROWS>(row, part));
    }
    UNROLL for (u32 mt = 0; mt < M_TILES; mt++)
        UNROLL for (u32 nt = 0; nt < S_TILES; nt++)
            multiply_add(s[mt][nt], a[mt], b[nt * 2], b[nt * 2 + 1]);
}

// Products of this warp's query rows with its cached rows. Of element e of a fragment the query row is
// lane / 4, and 8 more from e = 2 on; the cached row is lane % 4 * 2 + e % 2.
DEVICE void scores(Scores& s, u32 tile) {
    UNROLL for (u32 mt = 0; mt < M_TILES; mt++)
        UNROLL for (u32 nt = 0; nt < S_TILES; nt++)
            UNROLL for (u32 e = 0; e < 4; e++) s[mt][nt][e] = 0.0f;
#if DTYPE == FP8
    // A group's products are summed before its scale is applied, in f32: nothing is rounded.
    u32 lane = thread_index() % 32;
    UNROLL_1 for (u32 group = 0; group < FP8_GROUPS; group++) {
        Scores of_group = {};
        UNROLL for (u32 step = 0; step < 8; step++) score_step(of_group, tile, group * 8 + step);
        UNROLL for (u32 nt = 0; nt < S_TILES; nt++)
            UNROLL for (u32 odd = 0; odd < 2; odd++) {
                u32 row = own_party() * (S_TILES * 8) + nt * 8 + lane % 4 * 2 + odd;
                float scale = load_shared<float>(SCALES_AT + (group * ROWS + row) * 4);
                UNROLL for (u32 mt = 0; mt < M_TILES; mt++)
                    UNROLL for (u32 half = 0; half < 2; half++) {
                        float& sum = s[mt][nt][half * 2 + odd];
                        sum = multiply_add(of_group[mt][nt][half * 2 + odd], scale, sum);
                    }
            }
    }
    UNROLL for (u32 step = 32; step < K_STEPS; step++) score_step(s, tile, step);
#else
    UNROLL for (u32 step = 0; step < K_STEPS; step++) score_step(s, tile, step);
#endif
}

// Adds the weighted values of a tile to this warp's outputs.
DEVICE void add_values(Outputs& o, u32 tile) {
    u32 lane = thread_index() % 32;
    UNROLL for (u32 step = 0; step < T_STEPS; step++) {
        u32 a[M_TILES][4];
        UNROLL for (u32 mt = 0; mt < M_TILES; mt++) {
            u32 row = own_group() * GROUP_QUERIES + mt * 16 + lane % 16;
            load_matrices(a[mt], weights_at(row, step * 2 + lane / 16));
        }
#if DTYPE == FP8
        // This warp's values are of one group: its scales go to the weights.
        UNROLL for (u32 half = 0; half < 2; half++) {
            u32 row = step * 16 + half * 8 + lane % 4 * 2;
            u32 at = SCALES_AT + (own_party() * ROWS + row) * 4;
            float low = load_shared<float>(at), high = load_shared<float>(at + 4);
            UNROLL for (u32 mt = 0; mt < M_TILES; mt++)
                UNROLL for (u32 of = 0; of < 2; of++) {
                    u32& both = a[mt][half * 2 + of];
                    both = pack(float_of_bits(both << 16) * low,
                                float_of_bits(both & 0xffff0000u) * high);
                }
        }
#endif
        u32 row = step * 16 + lane % 16;
        UNROLL for (u32 pair = 0; pair < O_TILES / 2; pair++) {
            u32 part = (own_party() * O_COLUMNS + pair * 16) / 8 + lane / 16;
            u32 b[4];
            load_matrices_transposed(b, tile + tile_at<ROWS>(row, part));
            UNROLL for (u32 mt = 0; mt < M_TILES; mt++) {
                multiply_add(o[mt][pair * 2], a[mt], b[0], b[1]);
                multiply_add(o[mt][pair * 2 + 1], a[mt], b[2], b[3]);
            }
        }
    }
}

#endif

// What a thread keeps of its query rows: r / 2 is the tile of 16, r % 2 the half of it.
static constexpr u32 OWN_ROWS = M_TILES * 2;

struct Softmax {
    float m[OWN_ROWS];     // the largest product so far, before the scale
    float base[OWN_ROWS];  // the product that weights are relative to: that one, or one little smaller
    float l[OWN_ROWS];     // this thread's part of the denominator relative to it
    u32 end[OWN_ROWS];     // the first row of the list that the query row does not attend
};

// Weights are relative to the same product until one comes that is larger by so many powers of 2: what is
// summed is seldom multiplied, and no weight is too large for f16.
static constexpr float BASE_BELOW_MAXIMUM = 8.0f;

DEVICE u32 own_query(u32 r) {
    u32 warp = thread_index() / 32, lane = thread_index() % 32;
    u32 first = WGMMA ? warp % 4 * 16 : own_group() * GROUP_QUERIES;
    return first + r / 2 * 16 + r % 2 * 8 + lane / 4;
}

// Products with rows that are not attended, or not by their query row, become -inf.
DEVICE void leave_out(Scores& s, const Softmax& softmax, u32 first, u32 stage) {
    u32 lane = thread_index() % 32, party = own_party();
    u32 attended = ATTENDED_AT + stage * ATTENDED_BYTES + party * (S_TILES * 2);
    u32 missing = 0;
    UNROLL for (u32 at = 0; at < S_TILES * 2; at += 2) missing |= load_shared<u16>(attended + at) ^ 0x0f0f;
    bool is_whole = missing == 0;
    UNROLL for (u32 r = 0; r < OWN_ROWS; r++) is_whole = is_whole && first + ROWS <= softmax.end[r];
    if (is_whole) return;
    UNROLL for (u32 nt = 0; nt < S_TILES; nt++) {
        u32 four = load_shared<u8>(attended + nt * 2 + lane % 4 / 2);
        UNROLL for (u32 odd = 0; odd < 2; odd++) {
            u32 row = party * (S_TILES * 8) + nt * 8 + lane % 4 * 2 + odd;
            bool is_row = four >> (row % 4) & 1;
            UNROLL for (u32 r = 0; r < OWN_ROWS; r++)
                if (!is_row || first + row >= softmax.end[r])
                    s[r / 2][nt][r % 2 * 2 + odd] = minus_infinity();
        }
    }
}

// From products to weights in shared memory; outputs and denominators follow the new base.
DEVICE void weigh(Scores& s, Softmax& softmax, Outputs& o, u32 first, u32 stage, float scale_log2) {
    u32 lane = thread_index() % 32;
    u32 group = own_group(), party = own_party();
    leave_out(s, softmax, first, stage);
    UNROLL for (u32 r = 0; r < OWN_ROWS; r++) {
        float m = minus_infinity();
        UNROLL for (u32 nt = 0; nt < S_TILES; nt++)
            m = larger(m, larger(s[r / 2][nt][r % 2 * 2], s[r / 2][nt][r % 2 * 2 + 1]));
        m = larger(m, shuffle_xor(m, 1));
        m = larger(m, shuffle_xor(m, 2));
        if (lane % 4 == 0) store_shared<float>(EXCHANGE_AT + (party * QUERIES + own_query(r)) * 4, m);
    }
    barrier_of(1 + group, GROUP_THREADS);
    float keep[OWN_ROWS];
    bool changes = false;
    UNROLL for (u32 r = 0; r < OWN_ROWS; r++) {
        float m = softmax.m[r];
        UNROLL for (u32 w = 0; w < PARTIES; w++)
            m = larger(m, load_shared<float>(EXCHANGE_AT + (w * QUERIES + own_query(r)) * 4));
        softmax.m[r] = m;
        bool moves = multiply_add(m, scale_log2, -softmax.base[r] * scale_log2) > BASE_BELOW_MAXIMUM;
        float base = moves ? m : softmax.base[r];
        // Without a row yet everything is relative to 0, and every weight comes out as 0.
        float scaled = base == minus_infinity() ? 0.0f : base * scale_log2;
        keep[r] = moves ? power_of_2(multiply_add(softmax.base[r], scale_log2, -scaled)) : 1.0f;
        softmax.base[r] = base;
        changes = changes || moves;
        float l = 0.0f;
        UNROLL for (u32 nt = 0; nt < S_TILES; nt++) {
            float* of = &s[r / 2][nt][r % 2 * 2];
            float low = power_of_2(multiply_add(of[0], scale_log2, -scaled));
            float high = power_of_2(multiply_add(of[1], scale_log2, -scaled));
            l += low + high;
            u32 part = party * S_TILES + nt;
            store_shared<u32>(weights_at(own_query(r), part) + lane % 4 * 4, pack(low, high));
        }
        softmax.l[r] = softmax.l[r] * keep[r] + l;
    }
    if (any_lane(changes))
        UNROLL for (u32 mt = 0; mt < M_TILES; mt++)
            UNROLL for (u32 nt = 0; nt < O_TILES; nt++)
                UNROLL for (u32 e = 0; e < 4; e++) o[mt][nt][e] *= keep[mt * 2 + e / 2];
    products_will_read();
    barrier_of(1 + group, GROUP_THREADS);
}

// Normalises and writes to the job's result, or to the parts where there are several.
DEVICE void write_out(const Job& job, const Work& work, Softmax& softmax, Outputs& o, u64 part_o,
                      u64 part_m, u64 part_l) {
    u32 lane = thread_index() % 32;
    u32 group = own_group(), party = own_party();
    UNROLL for (u32 r = 0; r < OWN_ROWS; r++) {
        float l = softmax.l[r];
        l += shuffle_xor(l, 1);
        l += shuffle_xor(l, 2);
        if (lane % 4 == 0) store_shared<float>(EXCHANGE_AT + (party * QUERIES + own_query(r)) * 4, l);
    }
    barrier_of(1 + group, GROUP_THREADS);
    bool is_whole = job.splits == 1;
    u64 to_o = is_whole ? job.o : part_o;
    u64 to_m = is_whole ? job.m : part_m;
    u64 to_l = is_whole ? job.l : part_l;
    u64 first = is_whole ? 0 : job.part_row + (u64)work.split * job.query_rows;
    UNROLL for (u32 r = 0; r < OWN_ROWS; r++) {
        float l = 0.0f;
        UNROLL for (u32 w = 0; w < PARTIES; w++)
            l += load_shared<float>(EXCHANGE_AT + (w * QUERIES + own_query(r)) * 4);
        u32 query = work.query_first + own_query(r);
        if (query >= job.query_rows) continue;
        u64 row = first + query;
        float inverse = l > 0.0f ? 1.0f / l : 0.0f;
        float beyond = (softmax.base[r] - softmax.m[r]) * (job.scale * LOG2_E);
        if (party == 0 && lane % 4 == 0) {
            store_global<float>(to_m + row * 4, l > 0.0f ? softmax.m[r] * job.scale : minus_infinity());
            store_global<float>(to_l + row * 4, l > 0.0f ? l * power_of_2(beyond) : 0.0f);
        }
        UNROLL for (u32 nt = 0; nt < O_TILES; nt++) {
            u32 value = party * O_COLUMNS + nt * 8 + lane % 4 * 2;
            u64 at = to_o + (row * D_V + value) * 4;
            Pair pair = {o[r / 2][nt][r % 2 * 2] * inverse, o[r / 2][nt][r % 2 * 2 + 1] * inverse};
            if constexpr (D_V % 2 == 0) {
                if (D_V == D_V_PADDED || value < D_V) store_global<Pair>(at, pair);
            } else {
                if (value < D_V) store_global<float>(at, pair.first);
                if (value + 1 < D_V) store_global<float>(at + 4, pair.second);
            }
        }
    }
}

DEVICE void begin(Softmax& softmax, Outputs& o, const Job& job, const Work& work) {
    UNROLL for (u32 r = 0; r < OWN_ROWS; r++) {
        softmax.m[r] = softmax.base[r] = minus_infinity();
        softmax.l[r] = 0.0f;
        u32 query = work.query_first + own_query(r);
        bool is_limited = job.visible != 0 && query < job.query_rows;
        u32 visible = is_limited ? load_global<u32>(job.visible + (u64)query * 4) : work.row_end;
        softmax.end[r] = visible < work.row_end ? visible : work.row_end;
    }
    UNROLL for (u32 mt = 0; mt < M_TILES; mt++)
        UNROLL for (u32 nt = 0; nt < O_TILES; nt++)
            UNROLL for (u32 e = 0; e < 4; e++) o[mt][nt][e] = 0.0f;
}

#if WGMMA
// A work's tiles in the order in which they are attended. Works of one job's other query rows begin with other
// tiles: those that run beside each other do not all ask the second-level cache for the same rows.
struct Tiles {
    u32 count, row_first, row_end, begin;

    DEVICE_MEMBER explicit Tiles(const Work& work) : row_first(work.row_first), row_end(work.row_end) {
        count = (row_end - row_first + ROWS - 1) / ROWS;
        begin = count ? work.query_first / QUERIES % count : 0;
    }
    // Beyond the last one there are no rows.
    DEVICE_MEMBER u32 first_row(u32 tile) const {
        u32 at = begin + tile;
        return tile < count ? row_first + (at < count ? at : at - count) * ROWS : row_end;
    }
};

// Lanes have come as far as their first one: they wait for products together.
DEVICE void arrive_of_warp(u32 at) {
    if (thread_index() % 32 == 0) arrive(at);
}

DEVICE u32 arrivals_at(u32 at, u32 tile, u32 party) { return at + (tile % STAGES * PARTIES + party) * 8; }

// Copies the rows of a tile that a party has the scores of, when those that lay there have been read.
template <u32 PARTY> DEVICE void copy_rows_of(const List& list, const Places& places, u32 tile) {
    static constexpr u32 PASSES = COPY_PASSES / PARTIES;
    u32 landed = arrivals_at(LANDED_AT, tile, PARTY);
    if (tile >= STAGES) wait_for_arrivals(arrivals_at(READ_AT, tile, PARTY), tile / STAGES % 2 ^ 1);
    copy_rows<PARTY * PASSES, (PARTY + 1) * PASSES>(list, places, tile % STAGES);
    arrive_after_copies(landed);
    arrive_of_warp(landed);  // for the values stored next to the copies
}

// Copies the tiles of a work one after another, each to where the one before the last was. Where rows lie is
// looked up one tile ahead, and what a list has there two: the answers come while copies begin.
DEVICE void copy(const Job& job, const Work& work) {
    const List list = list_of(job);
    u32 rows[COPY_PASSES];
    Places places;
    const Tiles tiles(work);
    pick(rows, list, tiles.first_row(0), work.row_end);
    place(places, list, rows);
    pick(rows, list, tiles.first_row(1), work.row_end);
    UNROLL_1 for (u32 tile = 0; tile < tiles.count; tile++) {
        Places next;
        place(next, list, rows);
        pick(rows, list, tiles.first_row(tile + 2), work.row_end);
        copy_rows_of<0>(list, places, tile);
        copy_rows_of<1>(list, places, tile);
        places = next;
    }
}

DEVICE void wait_for_rows(u32 tile, u32 party) {
    wait_for_arrivals(arrivals_at(LANDED_AT, tile, party), tile / STAGES % 2);
    products_will_read_arrived();
}

// Attends the tiles as they land. The scores of the next one begin behind the values of each, so that
// nothing is multiplied only while weights are computed. Either warpgroup begins with its own rows, and
// rows make room as soon as their values are added.
DEVICE void attend(const Job& job, const Work& work, u64 part_o, u64 part_m, u64 part_l) {
    copy_query(job, work.query_first);
    copies_end_group();
    Softmax softmax;
    Outputs o;
    begin(softmax, o, job, work);
    float scale_log2 = job.scale * LOG2_E;
    Scores s;
    float (&sums)[16] = *(float(*)[16])&s;
    float (&outputs)[128] = *(float(*)[128])&o;
    copies_wait();
    products_will_read();
    barrier_of(1, ATTENDING);
    Queries q;
    keep_queries(q);
    u32 party = of_warp(own_party());
    const Tiles tiles(work);
    if (tiles.count > 0) {
        wait_for_rows(0, party);
        scores_begin(s, q, TILES_AT);
        products_wait<0>(sums);
    }
    UNROLL_1 for (u32 tile = 0; tile < tiles.count; tile++) {
        u32 stage = tile % STAGES;
        u32 at = TILES_AT + stage * TILE_BYTES;
        weigh(s, softmax, o, tiles.first_row(tile), stage, scale_log2);
        // They have landed, or the other party would have no weights: this thread's products see them now.
        wait_for_rows(tile, party ^ 1);
        add_values_begin(o, at, 0);
        add_values_begin(o, at, 1);
        if (tile + 1 < tiles.count) {
            wait_for_rows(tile + 1, party);
            scores_begin(s, q, TILES_AT + (stage ^ 1) * TILE_BYTES);
            products_wait<2>();
            arrive_of_warp(arrivals_at(READ_AT, tile, 0));
            products_wait<1>(outputs);
            arrive_of_warp(arrivals_at(READ_AT, tile, 1));
            products_wait<0>(sums);
        } else {
            products_wait<0>(outputs);
        }
    }
    write_out(job, work, softmax, o, part_o, part_m, part_l);
}

KERNEL void BOUNDS kvasir_partial(const Job* jobs, const Work* works, u64 part_o, u64 part_m, u64 part_l) {
    fetch_ahead((u64)jobs);  // most often there is one job; it comes while the work does
    const Work work = works[block_x()];
    // Read again where it is used: registers are scarcer than reads that hit the cache.
    const Job& job = jobs[work.job];
    check_shared_memory();
    if (thread_index() < STAGES * PARTIES) {
        arrivals_init(LANDED_AT + thread_index() * 8, COPYING + COPYING / 32);
        arrivals_init(READ_AT + thread_index() * 8, ATTENDING / 32);
    }
    barrier_all();
    merge_may_begin();
    if (thread_index() >= ATTENDING) {
        registers_of_copying();
        copy(job, work);
    } else {
        registers_of_attending();
        attend(job, work, part_o, part_m, part_l);
    }
}
#else
KERNEL void BOUNDS kvasir_partial(const Job* jobs, const Work* works, u64 part_o, u64 part_m, u64 part_l) {
    fetch_ahead((u64)jobs);  // most often there is one job; it comes while the work does
    const Work work = works[block_x()];
    // Read again where it is used: registers are scarcer than reads that hit the cache.
    const Job& job = jobs[work.job];
    // A group without query rows only copies.
    merge_may_begin();
    bool attends = work.query_first + own_group() * GROUP_QUERIES < job.query_rows;
    float scale_log2 = job.scale * LOG2_E;
    Softmax softmax;
    Outputs o;
    begin(softmax, o, job, work);

    u32 rows[COPY_PASSES];
    Places places;
    const List list = list_of(job);
    u32 first = work.row_first;
    pick(rows, list, first, work.row_end);
    place(places, list, rows);
    copy_query(job, work.query_first);
    copy_rows(list, places, 0);
    copies_end_group();
    pick(rows, list, first + ROWS, work.row_end);
    place(places, list, rows);
    u32 stage = 0;
    for (; first < work.row_end; first += ROWS) {
        copies_wait();
        // This tile has landed for all; nobody reads the one before any more.
        barrier_all();
#if DTYPE == FP8
        widen_rows();
        barrier_all();
        u32 tile = TILES_AT;
#else
        u32 tile = TILES_AT + stage * TILE_BYTES;
#endif
        if (first + ROWS < work.row_end) {
            copy_rows(list, places, stage ^ 1);
            copies_end_group();
            pick(rows, list, first + 2 * ROWS, work.row_end);
            place(places, list, rows);
        }
        if (attends) {
            Scores s;
            scores(s, tile);
            weigh(s, softmax, o, first, stage, scale_log2);
            add_values(o, tile);
        }
        stage ^= 1;
    }
    copies_wait();
    if (attends) write_out(job, work, softmax, o, part_o, part_m, part_l);
}
#endif
