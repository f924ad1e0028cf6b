// What host and device agree on: jobs, works, and how shared memory is laid out.
//
// The source of the kernels is this file, `machine.cu`, `partial.cu` and `merge.cu`, one after another. It has three
// readers: NVRTC for sm_80, NVRTC for sm_90, and a C++ compiler, for which `tests/cuda/emulation.cpp` gives the
// functions of `machine.cu` another meaning. So it includes nothing. Defined by whoever compiles it: D_QK,
// D_V, ROWS (64, or 32 where shared memory is small), WGMMA (1 for sm_90a, with D_V 512 and rows of bf16 or
// f16), OVERLAPS (1 from sm_90 on), DTYPE (0 bf16, 1 f16, 2 rows of fp8 as `fp8.rs` has them, with queries of
// bf16), and SHARED, the bytes of shared memory that it launches with.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

// Addresses are the device's. All rows and queries lie at multiples of 16 bytes.
struct Job {
    u64 query;     // query_rows rows of D_QK values, bf16 or f16, at query_stride_bytes
    u64 pages;     // u64[]: where each page begins
    u64 selected;  // u32[rows]: which row of the pages each row of the list is, or 0 for all in order
    u64 visible;   // u32[query_rows]: length of the prefix of the list that query row i attends, or 0 for all
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

static constexpr u32 ATTENDING = 256;  // threads; the first ones
static constexpr u32 COPYING = WGMMA ? 128 : ATTENDING;
static constexpr u32 THREADS = WGMMA ? ATTENDING + COPYING : ATTENDING;
static constexpr u32 MERGE_THREADS = 128;
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
// Of a tile: which rows are attended, four in the lower bits of a byte.
static constexpr u32 ATTENDED_BYTES = ROWS / 4;

// Shared memory, in bytes from its beginning.
static constexpr u32 QUERY_AT = 0;
static constexpr u32 TILES_AT = QUERY_AT + QUERY_COLUMNS * QUERY_COLUMN_BYTES;
static constexpr u32 RAW_AT = TILES_AT + STAGES * TILE_BYTES;
static constexpr u32 WEIGHTS_AT = RAW_AT + RAW_BYTES;
static constexpr u32 SCALES_AT = WEIGHTS_AT + QUERIES * ROWS * 2;
static constexpr u32 EXCHANGE_AT = SCALES_AT + SCALES_BYTES;
static constexpr u32 ATTENDED_AT = EXCHANGE_AT + 4 * QUERIES * 4;
// Of each party's rows of each stage, arrivals of those that have copied them, then of those that have read them.
static constexpr u32 LANDED_AT = ATTENDED_AT + 2 * ATTENDED_BYTES;
static constexpr u32 READ_AT = LANDED_AT + STAGES * PARTIES * 8;
static constexpr u32 SHARED_BYTES = WGMMA ? READ_AT + STAGES * PARTIES * 8 : LANDED_AT;

static constexpr u32 COPY_LANES = 8;  // threads that copy one row
static constexpr u32 COPY_ROWS = COPYING / COPY_LANES;
static constexpr u32 COPY_PASSES = ROWS / COPY_ROWS;
static constexpr u32 QUERY_COPY_ROWS = ATTENDING / COPY_LANES;

static constexpr u32 M_TILES = WGMMA ? 1 : 2;              // of 16 query rows, in a warp
static constexpr u32 S_TILES = ROWS / PARTIES / 8;         // of 8 cached rows, in a party
static constexpr u32 O_COLUMNS = D_V_PADDED / PARTIES;     // of a party
static constexpr u32 O_TILES = O_COLUMNS / 8;
static constexpr u32 K_STEPS = (D_QK + 15) / 16;
static constexpr u32 T_STEPS = ROWS / 16;
static constexpr u32 KEPT_STEPS = K_STEPS < 12 ? K_STEPS : 12;  // whose queries are in registers: more find no room
static_assert(ROWS == 32 || ROWS == 64, "a warp has 8 or 16 cached rows");
static_assert(!WGMMA || (ROWS == 64 && D_V == 512 && DTYPE != FP8), "the instructions are of one size");
static_assert(SHARED_BYTES == SHARED, "whoever launches counts shared memory otherwise");
