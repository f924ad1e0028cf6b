// Partial attention of absorbed MLA on tensor cores (Flash-Decoding, arXiv 2205.14135 and its split over
// rows), over cached rows in the slots where they lie.
//
// For query row i and the cached rows t that it attends, with q_i of D_QK values, k_t a cached row and
// v_t its first D_V values:
//
//     s_it = scale * <q_i, k_t>    m_i = max_t s_it    l_i = sum_t exp(s_it - m_i)
//     o_i  = sum_t exp(s_it - m_i) * v_t / l_i
//
// One CTA of 256 threads takes one `Work`: up to 64 query rows against a range of cached rows, ROWS at a
// time. Its 8 warps stand in groups that share query rows; a group's parties each have the scores of
// some of the cached rows, and some of the outputs. By `mma`, there are 2 groups of 32 query rows, and
// each of a group's 4 warps is a party. By `wgmma` (sm_90a), which reads all from shared memory, there is
// 1 group, and its 2 warpgroups are the parties. Where a job's rows are split over CTAs, each leaves a
// partial and `kvasir_merge` merges them in the order of the splits.
//
// The source has three readers: NVRTC for sm_80, NVRTC for sm_90, and a C++ compiler, for which
// `tests/cuda/emulation.cpp` gives the functions of "what the machine does" another meaning. So it
// includes nothing. Defined by whoever compiles it: D_QK, D_V, ROWS (64, or 32 where shared memory is
// small), WGMMA (1 for sm_90a, with D_V 512 and rows of bf16 or f16), DTYPE (0 bf16, 1 f16, 2 rows of fp8 as `fp8.rs` has them, with queries of bf16), and SHARED, the
// bytes of shared memory that it launches with.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

// Addresses are the device's. All rows and queries lie at multiples of 16 bytes.
struct Job {
    u64 query;     // query_rows rows of D_QK values, bf16 or f16, at query_stride_bytes
    u64 pages;     // u64[]: where each page begins
    u64 selected;  // u32[rows]: which row of the pages each row of the list is, or 0 for all in order
    u64 visible;   // u32[query_rows]: query row i attends the first so many of the list, or 0 for all
    u64 o;         // f32[query_rows][D_V]
    u64 m;         // f32[query_rows]
    u64 l;         // f32[query_rows]
    u64 part_row;  // the first row of the parts that is this job's
    u32 query_rows;
    u32 query_stride_bytes;
    u32 rows;       // rows of the list
    u32 page_rows;  // rows of all pages together; a selected row beyond is not attended
    u32 rows_per_page;
    u32 row_stride_bytes;
    u32 splits;  // 1: the partial goes to o, m and l at once
    float scale;
};

struct Work {
    u32 job;
    u32 query_first;  // its 64 query rows, or as many as there are
    u32 row_first;    // its rows of the list: from here
    u32 row_end;      // to before here
    u32 split;        // which of the job's splits
};

struct alignas(8) Pair {
    float first, second;
};

#define BF16 0
#define F16 1
#define FP8 2

static constexpr u32 THREADS = 256;
static constexpr u32 QUERIES = 64;  // query rows of a CTA
#if WGMMA
static constexpr u32 PARTIES = 2;
static constexpr u32 GROUP_QUERIES = 64;
static constexpr u32 GROUP_THREADS = 256;
#else
static constexpr u32 PARTIES = 4;
static constexpr u32 GROUP_QUERIES = 32;
static constexpr u32 GROUP_THREADS = 128;
#endif

// Tiles in shared memory are columns of 64 values: a column has the tile's rows one after another, each
// 128 bytes, whose 16-byte parts are swapped by the row's last three bits, so that 8 rows read at one
// place, as `ldmatrix` does, lie in 8 different banks.
static constexpr u32 LINE_BYTES = 128;
static constexpr u32 D_V_PADDED = (D_V + 63) / 64 * 64;
static constexpr u32 QUERY_COLUMNS = (D_QK + 63) / 64;
static constexpr u32 COLUMNS = QUERY_COLUMNS * 64 > D_V_PADDED ? QUERY_COLUMNS : D_V_PADDED / 64;
static constexpr u32 QUERY_COLUMN_BYTES = QUERIES * LINE_BYTES;
static constexpr u32 COLUMN_BYTES = ROWS * LINE_BYTES;
static constexpr u32 TILE_BYTES = COLUMNS * COLUMN_BYTES;

// Rows of fp8: 512 of e4m3, 4 scales of f32, 64 of bf16.
static constexpr u32 FP8_ROW_BYTES = 656;
static constexpr u32 FP8_GROUPS = 4;
static constexpr u32 FP8_SCALES_AT = 512;
static constexpr u32 FP8_ROPE_AT = 528;

#if DTYPE == FP8
static constexpr u32 ROW_BYTES = FP8_ROW_BYTES;
static constexpr u32 STAGES = 1;  // tiles; the bytes of the next one wait as they came
static constexpr u32 RAW_BYTES = ROWS * FP8_ROW_BYTES;
static constexpr u32 SCALES_BYTES = FP8_GROUPS * ROWS * 4;
static_assert(D_QK == 576 && D_V == 512, "rows of fp8 have one shape");
#else
static constexpr u32 ROW_BYTES = D_QK * 2;
static constexpr u32 STAGES = 2;
static constexpr u32 RAW_BYTES = 0;
static constexpr u32 SCALES_BYTES = 0;
#endif
static constexpr u32 QUERY_ROW_BYTES = D_QK * 2;

// Shared memory, in bytes from its beginning.
static constexpr u32 QUERY_AT = 0;
static constexpr u32 TILES_AT = QUERY_AT + QUERY_COLUMNS * QUERY_COLUMN_BYTES;
static constexpr u32 RAW_AT = TILES_AT + STAGES * TILE_BYTES;
static constexpr u32 WEIGHTS_AT = RAW_AT + RAW_BYTES;
static constexpr u32 SCALES_AT = WEIGHTS_AT + QUERIES * ROWS * 2;
static constexpr u32 EXCHANGE_AT = SCALES_AT + SCALES_BYTES;
static constexpr u32 ATTENDED_AT = EXCHANGE_AT + 4 * QUERIES * 4;
static constexpr u32 SHARED_BYTES = ATTENDED_AT + 2 * ROWS * 4;

static constexpr u32 COPY_LANES = 8;  // threads that copy one row
static constexpr u32 COPY_ROWS = THREADS / COPY_LANES;
static constexpr u32 COPY_PASSES = ROWS / COPY_ROWS;

static constexpr u32 M_TILES = WGMMA ? 1 : 2;              // of 16 query rows, in a warp
static constexpr u32 S_TILES = ROWS / PARTIES / 8;         // of 8 cached rows, in a party
static constexpr u32 O_COLUMNS = D_V_PADDED / PARTIES;     // of a party
static constexpr u32 O_TILES = O_COLUMNS / 8;
static constexpr u32 K_STEPS = (D_QK + 15) / 16;
static constexpr u32 T_STEPS = ROWS / 16;
static_assert(ROWS == 32 || ROWS == 64, "a warp has 8 or 16 cached rows");
static_assert(!WGMMA || (ROWS == 64 && D_V == 512 && DTYPE != FP8), "the instructions are of one size");
static_assert(SHARED_BYTES == SHARED, "whoever launches counts shared memory otherwise");

// What the machine does.
#ifndef KVASIR_EMULATION
#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__
#define BOUNDS __launch_bounds__(256, 1)
#define UNROLL _Pragma("unroll")
#define UNROLL_4 _Pragma("unroll 4")
#define UNROLL_1 _Pragma("unroll 1")

extern __shared__ __align__(1024) u8 shared_bytes[];

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }

// Shared memory by its offset.
DEVICE u32 shared_address(u32 at) { return (u32)__cvta_generic_to_shared(shared_bytes) + at; }
template <typename T> DEVICE T load_shared(u32 at) { return *(const T*)(shared_bytes + at); }
template <typename T> DEVICE void store_shared(u32 at, T value) { *(T*)(shared_bytes + at) = value; }

template <typename T> DEVICE T load_global(u64 at) { return *(const T*)at; }
template <typename T> DEVICE void store_global(u64 at, T value) { *(T*)at = value; }

// 16 bytes from global to shared memory, later; those from `bytes` on become zero.
DEVICE void copy_16(u32 at, u64 from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(at)), "l"(from),
                 "r"(bytes)
                 : "memory");
}
DEVICE void copies_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All groups of this thread have landed.
DEVICE void copies_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

DEVICE void barrier_all() { __syncthreads(); }
DEVICE void barrier_of(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE float shuffle_xor(float value, u32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
// The same value in all lanes, which the compiler then keeps once for the warp.
DEVICE u32 of_warp(u32 value) { return __shfl_sync(0xffffffffu, value, 0); }
DEVICE bool any_lane(bool value) { return __any_sync(0xffffffffu, value); }

// Four matrices of 8 × 8 values of 16 bits: lane i names a row, of matrix i / 8; each lane gets of every
// matrix two neighbours of row lane / 4.
DEVICE void load_matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(at))
                 : "memory");
}
// Two of them; the addresses are those of lanes 0 to 15.
DEVICE void load_two_matrices(u32& r0, u32& r1, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r0), "=r"(r1)
                 : "r"(shared_address(at))
                 : "memory");
}
// Four of them, each transposed.
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(at))
                 : "memory");
}
// d += a · b, of 16 × 16 by 16 × 8 values.
DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if DTYPE == F16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#if WGMMA
#if DTYPE == F16
#define WGMMA_TYPES "f16.f16"
#else
#define WGMMA_TYPES "bf16.bf16"
#endif
// What this thread has written to shared memory is seen by products that begin after a barrier.
DEVICE void products_will_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_wait() {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// d (+)= a · b of a warpgroup, 64 × 16 by 16 × 32 values, where descriptors of shared memory say; b has
// 16 values of a column side by side. A thread's four values of d for every 8 columns are those of `mma`.
DEVICE void multiply_32(float (&d)[16], u64 a, u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." WGMMA_TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, adds, 1, 1, 0, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
          "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"((u32)adds));
}
// The same by 16 × 256 values; b has 64 values of a row side by side.
DEVICE void multiply_256(float (&d)[128], u64 a, u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." WGMMA_TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, "
        "%72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, "
        "%88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, "
        "%104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, "
        "%120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, adds, 1, 1, 0, 1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
          "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
          "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]),
          "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
          "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]),
          "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]),
          "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
          "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]),
          "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]),
          "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
          "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]),
          "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),
          "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]),
          "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
        : "l"(a), "l"(b), "r"((u32)adds));
}
// Lines are swapped by bits of their address.
DEVICE void check_shared_memory() {
    if (shared_address(0) % 1024 != 0) asm volatile("trap;");
}
#else
DEVICE void products_will_read() {}
DEVICE void check_shared_memory() {}
#endif
// Two values of 16 bits, the first in the lower half.
DEVICE u32 pack(float low, float high) {
    u32 both;
#if DTYPE == F16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}
// a · b - 0 in each half, of bf16.
DEVICE u32 multiply_bf16x2(u32 a, u32 b) {
    u32 both;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(a), "r"(b), "r"(0x80008000u));
    return both;
}
DEVICE float power_of_2(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}
DEVICE float float_of_bits(u32 bits) { return __uint_as_float(bits); }
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
#endif

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

// Where row `at` of the list lies; 0 where it is none.
DEVICE u64 row_address(const Job& job, u32 at, u32 row_end) {
    if (at >= row_end) return 0;
    u32 row = job.selected ? load_global<u32>(job.selected + (u64)at * 4) : at;
    if (row >= job.page_rows) return 0;
    u32 page = row / job.rows_per_page;
    return load_global<u64>(job.pages + (u64)page * 8) +
           (u64)(row - page * job.rows_per_page) * job.row_stride_bytes;
}

// The rows that this thread copies a part of, of the tile that begins at `first`.
DEVICE void look_up(u64 (&rows)[COPY_PASSES], const Job& job, u32 first, u32 row_end) {
    UNROLL for (u32 pass = 0; pass < COPY_PASSES; pass++)
        rows[pass] = row_address(job, first + pass * COPY_ROWS + thread_index() / COPY_LANES, row_end);
}

// Begins to copy a tile's rows; those that are none become zero, and are noted as not attended.
DEVICE void copy_rows(const Job& job, const u64 (&rows)[COPY_PASSES], u32 stage) {
    u32 lane = thread_index() % COPY_LANES;
    UNROLL for (u32 pass = 0; pass < COPY_PASSES; pass++) {
        u32 row = pass * COPY_ROWS + thread_index() / COPY_LANES;
        u64 from = rows[pass] ? rows[pass] : job.query;
        u32 row_bytes = rows[pass] ? ROW_BYTES : 0;
        if (lane == 0) store_shared<u32>(ATTENDED_AT + (stage * ROWS + row) * 4, rows[pass] != 0);
#if DTYPE == FP8
        UNROLL for (u32 part = lane; part < FP8_ROW_BYTES / 16; part += COPY_LANES)
            copy_16(RAW_AT + row * FP8_ROW_BYTES + part * 16, from + part * 16, row_bytes ? 16 : 0);
#else
        u32 tile = TILES_AT + stage * TILE_BYTES;
        UNROLL for (u32 column = 0; column < COLUMNS; column++) {
            u32 part = column * 8 + lane;
            u32 bytes = part_bytes(row_bytes, part);
            copy_16(tile + tile_at<ROWS>(row, part), bytes ? from + part * 16 : from, bytes);
        }
#endif
    }
    copies_end_group();
}

DEVICE void copy_query(const Job& job, u32 query_first) {
    u32 lane = thread_index() % COPY_LANES;
    UNROLL for (u32 pass = 0; pass < QUERIES / COPY_ROWS; pass++) {
        u32 row = pass * COPY_ROWS + thread_index() / COPY_LANES;
        bool is_there = query_first + row < job.query_rows;
        u64 from = job.query + (is_there ? (u64)(query_first + row) * job.query_stride_bytes : 0);
        UNROLL for (u32 column = 0; column < QUERY_COLUMNS; column++) {
            u32 part = column * 8 + lane;
            u32 bytes = part_bytes(is_there ? QUERY_ROW_BYTES : 0, part);
            copy_16(QUERY_AT + tile_at<QUERIES>(row, part), bytes ? from + part * 16 : from, bytes);
        }
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

// Products of all query rows with the cached rows of this warpgroup.
DEVICE void scores(Scores& s, u32 tile) {
    u64 a = matrix_at(QUERY_AT, 16, BLOCK_BYTES);
    u64 b = matrix_at(of_warp(tile) + of_warp(own_party()) * (ROWS / PARTIES) * LINE_BYTES, 16, BLOCK_BYTES);
    products_begin();
    UNROLL for (u32 step = 0; step < K_STEPS; step++) {
        u32 column = step / 4, within = step % 4 * 32;
        multiply_32(*(float(*)[16])&s, a + matrix_offset(column * QUERY_COLUMN_BYTES + within),
                    b + matrix_offset(column * COLUMN_BYTES + within), step > 0);
    }
    products_wait();
}

// Adds the weighted values of a tile to this warpgroup's outputs.
DEVICE void add_values(Outputs& o, u32 tile) {
    u64 a = matrix_at(WEIGHTS_AT, 16, BLOCK_BYTES);
    u64 b = matrix_at(of_warp(tile) + of_warp(own_party()) * (O_COLUMNS / 64) * COLUMN_BYTES, COLUMN_BYTES, BLOCK_BYTES);
    products_begin();
    UNROLL for (u32 step = 0; step < T_STEPS; step++)
        multiply_256(*(float(*)[128])&o, a + matrix_offset(step * 32),
                     b + matrix_offset(step * 16 * LINE_BYTES), true);
    products_wait();
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
    float l[OWN_ROWS];     // this thread's part of the denominator relative to it
    u32 end[OWN_ROWS];     // the first row of the list that the query row does not attend
};

DEVICE u32 own_query(u32 r) {
    u32 warp = thread_index() / 32, lane = thread_index() % 32;
    u32 first = WGMMA ? warp % 4 * 16 : own_group() * GROUP_QUERIES;
    return first + r / 2 * 16 + r % 2 * 8 + lane / 4;
}

// From products to weights in shared memory; outputs and denominators follow the new maximum.
DEVICE void weigh(Scores& s, Softmax& softmax, Outputs& o, u32 first, u32 stage, float scale_log2) {
    u32 lane = thread_index() % 32;
    u32 group = own_group(), party = own_party();
    UNROLL for (u32 nt = 0; nt < S_TILES; nt++)
        UNROLL for (u32 odd = 0; odd < 2; odd++) {
            u32 row = party * (S_TILES * 8) + nt * 8 + lane % 4 * 2 + odd;
            bool is_row = load_shared<u32>(ATTENDED_AT + (stage * ROWS + row) * 4) != 0;
            UNROLL for (u32 r = 0; r < OWN_ROWS; r++)
                if (!is_row || first + row >= softmax.end[r])
                    s[r / 2][nt][r % 2 * 2 + odd] = minus_infinity();
        }
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
        // Without a row yet everything is relative to 0, and every weight comes out as 0.
        float base = m == minus_infinity() ? 0.0f : m * scale_log2;
        keep[r] = power_of_2(multiply_add(softmax.m[r], scale_log2, -base));
        changes = changes || m != softmax.m[r];
        float l = 0.0f;
        UNROLL for (u32 nt = 0; nt < S_TILES; nt++) {
            float* of = &s[r / 2][nt][r % 2 * 2];
            float low = power_of_2(multiply_add(of[0], scale_log2, -base));
            float high = power_of_2(multiply_add(of[1], scale_log2, -base));
            l += low + high;
            u32 part = party * S_TILES + nt;
            store_shared<u32>(weights_at(own_query(r), part) + lane % 4 * 4, pack(low, high));
        }
        softmax.m[r] = m;
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
        if (party == 0 && lane % 4 == 0) {
            store_global<float>(to_m + row * 4, l > 0.0f ? softmax.m[r] * job.scale : minus_infinity());
            store_global<float>(to_l + row * 4, l);
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

KERNEL void BOUNDS kvasir_partial(const Job* jobs, const Work* works, u64 part_o, u64 part_m, u64 part_l) {
    const Work work = works[block_x()];
    // Read again where it is used: registers are scarcer than reads that hit the cache.
    const Job& job = jobs[work.job];
    check_shared_memory();
    // A group without query rows only copies.
    bool attends = work.query_first + own_group() * GROUP_QUERIES < job.query_rows;
    float scale_log2 = job.scale * LOG2_E;

    Softmax softmax;
    UNROLL for (u32 r = 0; r < OWN_ROWS; r++) {
        softmax.m[r] = minus_infinity();
        softmax.l[r] = 0.0f;
        u32 query = work.query_first + own_query(r);
        bool is_limited = job.visible != 0 && query < job.query_rows;
        u32 visible = is_limited ? load_global<u32>(job.visible + (u64)query * 4) : work.row_end;
        softmax.end[r] = visible < work.row_end ? visible : work.row_end;
    }
    Outputs o;
    UNROLL for (u32 mt = 0; mt < M_TILES; mt++)
        UNROLL for (u32 nt = 0; nt < O_TILES; nt++)
            UNROLL for (u32 e = 0; e < 4; e++) o[mt][nt][e] = 0.0f;

    u64 rows[COPY_PASSES];
    u32 first = work.row_first;
    look_up(rows, job, first, work.row_end);
    copy_query(job, work.query_first);
    copy_rows(job, rows, 0);
    look_up(rows, job, first + ROWS, work.row_end);
    u32 stage = 0;
    for (; first < work.row_end; first += ROWS) {
        copies_wait();
        products_will_read();
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
            copy_rows(job, rows, stage ^ 1);
            look_up(rows, job, first + 2 * ROWS, work.row_end);
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

// Merges a job's parts, one CTA of 128 threads for query row x of job y. In the order of the splits, as
// `merge` of `partial.rs` does: what has no rows changes nothing, and one part alone keeps its bits.
KERNEL void kvasir_merge(const Job* jobs, u64 part_o, u64 part_m, u64 part_l) {
    const Job& job = jobs[block_y()];
    u32 query = block_x();
    if (job.splits == 1 || query >= job.query_rows) return;
    u64 row = job.part_row + query;
    float m = minus_infinity();
    u32 held = 0;
    for (u32 split = 0; split < job.splits; split++) {
        u64 at = (row + (u64)split * job.query_rows) * 4;
        if (load_global<float>(part_l + at) > 0.0f) {
            m = larger(m, load_global<float>(part_m + at));
            held++;
        }
    }
    float l = 0.0f;
    for (u32 split = 0; split < job.splits; split++) {
        u64 at = (row + (u64)split * job.query_rows) * 4;
        float of = load_global<float>(part_l + at);
        if (of > 0.0f) l += of * power_of_2((load_global<float>(part_m + at) - m) * LOG2_E);
    }
    for (u32 value = thread_index(); value < D_V; value += 128) {
        float sum = 0.0f;
        UNROLL_4 for (u32 split = 0; split < job.splits; split++) {
            u64 part = row + (u64)split * job.query_rows;
            float of = load_global<float>(part_l + part * 4);
            float values = load_global<float>(part_o + (part * D_V + value) * 4);
            float share = of * power_of_2((load_global<float>(part_m + part * 4) - m) * LOG2_E) / l;
            sum = of > 0.0f ? (held == 1 ? values : multiply_add(share, values, sum)) : sum;
        }
        store_global<float>(job.o + ((u64)query * D_V + value) * 4, sum);
    }
    if (thread_index() == 0) {
        store_global<float>(job.m + (u64)query * 4, m);
        store_global<float>(job.l + (u64)query * 4, l);
    }
}
