// Runs `partial.cu` and `merge.cu` on the CPU. Each thread of a CTA is a fiber. The functions of `machine.cu` are
// emulated here, fragment by fragment, as the PTX ISA documents them. The emulation is slow and checks more than a
// GPU: copies access only registered memory, no access passes the end of shared memory, and the lanes of a warp
// execute the same operation together. Shared memory begins as NaN. Copies land as late as they may or as early, and
// warps run as far as they can one at a time in an order from a seed, so that a missing wait or barrier
// shows as a wrong result. Products read late where copies land early, and early where they land late.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define DEVICE static inline
#define DEVICE_MEMBER
#define KERNEL static
#define BOUNDS
#define MERGE_BOUNDS(ctas)
#define UNROLL
#define UNROLL_1

namespace machine {

constexpr unsigned LANES = 32;
constexpr unsigned THREADS_MAX = 384;
// Threads beyond copy and do nothing else.
constexpr unsigned ATTENDING_THREADS = 256;
constexpr size_t STACK_BYTES = 64 << 10;

struct Copy {
    uint32_t at;
    uint64_t from;
    uint32_t bytes;
    bool is_in_group;
};

// One product of a warpgroup that has begun.
struct Product {
    float* d;
    uint64_t a, b;
    unsigned columns;
    bool b_is_by_rows, adds;
    unsigned group;      // which of its thread's
    const unsigned* kept;  // a of the warp in registers, or null
};

struct Thread {
    ucontext_t start;
    jmp_buf at;
    bool is_started, is_done, is_waiting;
    const void* operand;
    std::vector<Copy> copies;
    std::vector<Product> products;
    unsigned groups;  // of products, that have ended
    std::vector<char> stack;
};

struct Barrier {
    unsigned arrived;
    std::vector<unsigned> waiting;
};

struct Warp {
    unsigned arrived;
    const char* doing;
};

// Arrivals in shared memory, where they are counted.
struct Arrivals {
    unsigned at, count, arrived, phase;
    std::vector<unsigned> waiting;  // threads, for the end of this phase
};

// An arrival when a thread's copies have landed.
struct Landing {
    unsigned at, thread;
    std::vector<Copy> copies;
};

struct Memory {
    uint64_t from, to;
};

static std::vector<Memory> memories;
static std::vector<uint8_t> shared;
// For each 16 bytes of it, 1 + the thread that wrote there and has not said that products will read it.
static std::vector<uint16_t> unseen;
static Thread threads[THREADS_MAX];
static Warp warps[THREADS_MAX / LANES];
static Barrier barriers[16];
static std::vector<Arrivals> arrivals;
static std::vector<Landing> landings;
static unsigned thread_count, current, block[2];
static bool copies_land_early;
static bool others_first;  // the warp that runs lets others go on
static uint64_t random_state;
static char failure[256];
static jmp_buf home;
static void (*body)();

[[noreturn]] static void fail(const char* what) {
    if (!failure[0])
        snprintf(failure, sizeof failure, "CTA %u,%u thread %u: %s", block[0], block[1], current, what);
    _longjmp(home, 2);
}

static void check_shared(uint64_t at, uint64_t bytes) {
    if (at % bytes || at + bytes > shared.size()) fail("shared memory beyond its end, or not aligned");
}

static void check_global(uint64_t from, uint64_t bytes) {
    for (const Memory& memory : memories)
        if (from >= memory.from && from + bytes <= memory.to) return;
    fail("global memory that nobody gave");
}

// Gives the processor to the scheduler until this thread may go on.
static void wait() {
    Thread& thread = threads[current];
    thread.is_waiting = true;
    if (!_setjmp(thread.at)) _longjmp(home, 1);
}

static void entry() {
    body();
    threads[current].is_done = true;
    _longjmp(home, 1);
}

// Each lane of a warp calls this with its operand. The last one executes the operation for all.
template <typename F> static void together(const char* doing, const void* operand, F all) {
    unsigned first = current / LANES * LANES;
    Warp& warp = warps[current / LANES];
    if (warp.arrived && warp.doing != doing) fail("lanes of a warp do different things");
    warp.doing = doing;
    threads[current].operand = operand;
    if (++warp.arrived < LANES) return wait();
    warp.arrived = 0;
    const void* operands[LANES];
    for (unsigned lane = 0; lane < LANES; lane++) {
        operands[lane] = threads[first + lane].operand;
        threads[first + lane].is_waiting = false;
    }
    all(operands);
}

static void barrier(unsigned id, unsigned count) {
    if (id >= 16 || count % LANES) fail("no such barrier");
    Barrier& barrier = barriers[id];
    barrier.waiting.push_back(current);
    if (++barrier.arrived < count) return wait();
    for (unsigned thread : barrier.waiting) threads[thread].is_waiting = false;
    barrier.waiting.clear();
    barrier.arrived = 0;
}

static void land(const Copy& copy, unsigned thread) {
    unseen[copy.at / 16] = uint16_t(1 + thread);
    memset(&shared[copy.at], 0, 16);
    memcpy(&shared[copy.at], (const void*)copy.from, copy.bytes);
}

static Arrivals& arrivals_at(unsigned at) {
    for (Arrivals& of : arrivals)
        if (of.at == at) return of;
    fail("no arrivals are counted there");
}

static void arrive_at(unsigned at) {
    Arrivals& of = arrivals_at(at);
    if (++of.arrived < of.count) return;
    of.arrived = 0;
    of.phase++;
    others_first = !of.waiting.empty();
    for (unsigned thread : of.waiting) threads[thread].is_waiting = false;
    of.waiting.clear();
}

// Completes the oldest copies with a counted arrival.
static bool land_oldest() {
    if (landings.empty()) return false;
    Landing landing = landings.front();
    landings.erase(landings.begin());
    if (!copies_land_early)
        for (const Copy& copy : landing.copies) land(copy, landing.thread);
    arrive_at(landing.at);
    return true;
}

static unsigned random_below(unsigned limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return unsigned((random_state >> 33) % limit);
}

static void resume(unsigned thread) {
    current = thread;
    if (threads[thread].is_started) _longjmp(threads[thread].at, 1);
    threads[thread].is_started = true;
    setcontext(&threads[thread].start);
}

// The next thread that can run: one of the running warp, or of a random other warp. Copies land when no thread can run
// without them, or earlier.
static bool next(unsigned& thread) {
    if (copies_land_early) while (land_oldest());
    unsigned warp_count = thread_count / LANES, warp = current / LANES;
    auto can_run = [](unsigned thread) { return !threads[thread].is_done && !threads[thread].is_waiting; };
    bool stays = !others_first;
    others_first = false;
    for (unsigned lane = 1; lane <= LANES && stays; lane++) {
        thread = warp * LANES + (current + lane) % LANES;
        if (can_run(thread)) return true;
    }
    for (unsigned i = 0, first = random_below(warp_count); i < warp_count; i++)
        for (unsigned lane = 0; lane < LANES; lane++) {
            thread = (first + i) % warp_count * LANES + lane;
            if (can_run(thread)) return true;
        }
    return land_oldest() && next(thread);
}

// Runs one CTA; false where `failure` says why not.
static bool run(unsigned count, unsigned x, unsigned y, size_t shared_size) {
    thread_count = count;
    block[0] = x;
    block[1] = y;
    shared.assign(shared_size, 0xff);
    unseen.assign(shared_size / 16, 0);
    for (Warp& warp : warps) warp = {};
    for (Barrier& barrier : barriers) barrier = {};
    arrivals.clear();
    landings.clear();
    for (unsigned i = 0; i < count; i++) {
        Thread& thread = threads[i];
        thread.stack.resize(STACK_BYTES);
        thread.copies.clear();
        thread.products.clear();
        thread.groups = 0;
        thread.is_started = thread.is_done = thread.is_waiting = false;
        getcontext(&thread.start);
        thread.start.uc_stack.ss_sp = thread.stack.data();
        thread.start.uc_stack.ss_size = STACK_BYTES;
        thread.start.uc_link = nullptr;
        makecontext(&thread.start, entry, 0);
    }
    current = random_below(count);
    if (_setjmp(home) == 2) return false;
    unsigned thread;
    if (next(thread)) resume(thread);
    for (unsigned i = 0; i < count; i++)
        if (!threads[i].is_done) {
            current = i;
            snprintf(failure, sizeof failure, "CTA %u,%u thread %u waits for ever", x, y, i);
            return false;
        }
    if (!landings.empty()) {
        snprintf(failure, sizeof failure, "CTA %u,%u: copies are never waited for", x, y);
        return false;
    }
    return true;
}

static float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static float widen_bf16(uint16_t bits) { return of_bits(uint32_t(bits) << 16); }

static uint16_t round_bf16(float value) {
    uint32_t bits = bits_of(value);
    if (std::isnan(value)) return 0x7fff;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float widen_f16(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                      : exponent == 0 ? std::ldexp(float(fraction), -24)
                                      : std::ldexp(float(1024 + fraction), exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}

static uint16_t round_f16(float value) {
    uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    float magnitude = std::fabs(value);
    if (std::isnan(value)) return 0x7fff;
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    if (magnitude < 0x1p-14f) return sign | uint16_t(std::nearbyint(magnitude * 0x1p24f));
    int exponent = std::ilogb(magnitude);
    return sign | uint16_t(((exponent + 14) << 10) + int(std::nearbyint(std::ldexp(magnitude, 10 - exponent))));
}

}  // namespace machine

// The functions of `machine.cu`.

static unsigned thread_index() { return machine::current; }
static unsigned block_x() { return machine::block[0]; }
static unsigned block_y() { return machine::block[1]; }

template <typename T> static T load_shared(unsigned at) {
    machine::check_shared(at, sizeof(T));
    T value;
    memcpy(&value, &machine::shared[at], sizeof(T));
    return value;
}

template <typename T> static void store_shared(unsigned at, T value) {
    machine::check_shared(at, sizeof(T));
    machine::unseen[at / 16] = uint16_t(1 + machine::current);
    memcpy(&machine::shared[at], &value, sizeof(T));
}

template <typename T> static T load_global(unsigned long long at) {
    if (at % sizeof(T)) machine::fail("a global address is not aligned");
    machine::check_global(at, sizeof(T));
    return *(const T*)at;
}

template <typename T> static void store_global(unsigned long long at, T value) {
    if (at % sizeof(T)) machine::fail("a global address is not aligned");
    machine::check_global(at, sizeof(T));
    *(T*)at = value;
}

static unsigned load_global_where(bool is_there, unsigned long long at, unsigned otherwise) {
    return is_there ? load_global<unsigned>(at) : otherwise;
}
static unsigned long long load_address_where(bool is_there, unsigned long long at) {
    return is_there ? load_global<unsigned long long>(at) : 0;
}

static void fetch_ahead(unsigned long long) {}

static void copy_16(unsigned at, unsigned long long from, unsigned bytes) {
    machine::check_shared(at, 16);
    if (from % 16 || bytes > 16) machine::fail("cp.async of an address that is not aligned");
    if (bytes) machine::check_global(from, bytes);
    machine::Copy copy = {at, from, bytes, false};
    if (machine::copies_land_early) machine::land(copy, machine::current);
    machine::threads[machine::current].copies.push_back(copy);
}

static void copies_end_group() {
    for (machine::Copy& copy : machine::threads[machine::current].copies) copy.is_in_group = true;
}

static void copies_wait() {
    std::vector<machine::Copy>& copies = machine::threads[machine::current].copies;
    std::vector<machine::Copy> later;
    for (const machine::Copy& copy : copies)
        if (!copy.is_in_group)
            later.push_back(copy);
        else if (!machine::copies_land_early)
            machine::land(copy, machine::current);
    copies = later;
}

static void merge_may_begin() {}
static void wait_for_parts() {}
static void barrier_all() { machine::barrier(0, machine::thread_count); }
static void barrier_of(unsigned id, unsigned threads) { machine::barrier(id, threads); }

static float shuffle_xor(float value, unsigned mask) {
    struct Operand {
        float value, got;
        unsigned mask;
    } own = {value, 0.0f, mask};
    machine::together("shuffle", &own, [](const void** operands) {
        for (unsigned lane = 0; lane < machine::LANES; lane++) {
            Operand& operand = *(Operand*)operands[lane];
            operand.got = ((const Operand*)operands[lane ^ operand.mask])->value;
        }
    });
    return own.got;
}

static float shuffle(float value, unsigned lane) {
    struct Operand {
        float value, got;
        unsigned lane;
    } own = {value, 0.0f, lane};
    machine::together("shuffle of one", &own, [](const void** operands) {
        for (unsigned lane = 0; lane < machine::LANES; lane++) {
            Operand& operand = *(Operand*)operands[lane];
            operand.got = ((const Operand*)operands[operand.lane % machine::LANES])->value;
        }
    });
    return own.got;
}

static unsigned of_warp(unsigned value) { return value; }

static bool any_lane(bool value) {
    struct Operand {
        bool value, got;
    } own = {value, false};
    machine::together("any", &own, [](const void** operands) {
        bool any = false;
        for (unsigned lane = 0; lane < machine::LANES; lane++) any |= ((const Operand*)operands[lane])->value;
        for (unsigned lane = 0; lane < machine::LANES; lane++) ((Operand*)operands[lane])->got = any;
    });
    return own.got;
}

static unsigned which_lanes(bool value) {
    struct Operand {
        bool value;
        unsigned got;
    } own = {value, 0};
    machine::together("ballot", &own, [](const void** operands) {
        unsigned lanes = 0;
        for (unsigned lane = 0; lane < machine::LANES; lane++)
            lanes |= unsigned(((const Operand*)operands[lane])->value) << lane;
        for (unsigned lane = 0; lane < machine::LANES; lane++) ((Operand*)operands[lane])->got = lanes;
    });
    return own.got;
}

static void forget(unsigned long long&) {}

struct Matrices {
    unsigned* r[4];
    unsigned at;
};

// `count` matrices, by the addresses that lanes give: lane l of matrix m has row l / 4, values l % 4 * 2
// and the next; transposed, it has column l / 4 and those rows.
template <unsigned COUNT, bool TRANSPOSED> static void matrices(const char* doing, const Matrices& own) {
    machine::together(doing, &own, [](const void** operands) {
        for (unsigned matrix = 0; matrix < COUNT; matrix++) {
            uint16_t values[8][8];
            for (unsigned row = 0; row < 8; row++) {
                unsigned at = ((const Matrices*)operands[matrix * 8 + row])->at;
                machine::check_shared(at, 16);
                memcpy(values[row], &machine::shared[at], 16);
            }
            for (unsigned lane = 0; lane < machine::LANES; lane++) {
                unsigned i = lane / 4, j = lane % 4 * 2;
                unsigned low = TRANSPOSED ? values[j][i] : values[i][j];
                unsigned high = TRANSPOSED ? values[j + 1][i] : values[i][j + 1];
                *((const Matrices*)operands[lane])->r[matrix] = low | high << 16;
            }
        }
    });
}

static void load_matrices(unsigned (&r)[4], unsigned at) {
    matrices<4, false>("ldmatrix.x4", {{&r[0], &r[1], &r[2], &r[3]}, at});
}
static void load_two_matrices(unsigned& r0, unsigned& r1, unsigned at) {
    matrices<2, false>("ldmatrix.x2", {{&r0, &r1, nullptr, nullptr}, at});
}
static void load_matrices_transposed(unsigned (&r)[4], unsigned at) {
    matrices<4, true>("ldmatrix.x4.trans", {{&r[0], &r[1], &r[2], &r[3]}, at});
}

static float widen(uint16_t bits) { return DTYPE == 1 ? machine::widen_f16(bits) : machine::widen_bf16(bits); }

// mma.m16n8k16. Register 0 of a has row lane / 4 and values lane % 4 * 2 and the next; register 1 has the same values
// 8 rows below; registers 2 and 3 have the same rows 8 values on. Register 0 of b has column lane / 4 and the same
// values, register 1 the values 8 on. Registers 0 and 1 of d have row lane / 4, columns lane % 4 * 2 and the next;
// registers 2 and 3 are 8 rows below.
static void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    struct Operand {
        float* d;
        const unsigned* a;
        unsigned b[2];
    } own = {d, a, {b0, b1}};
    machine::together("mma", &own, [](const void** operands) {
        float a[16][16], b[16][8];
        for (unsigned lane = 0; lane < machine::LANES; lane++) {
            const Operand& operand = *(const Operand*)operands[lane];
            for (unsigned odd = 0; odd < 2; odd++) {
                for (unsigned r = 0; r < 4; r++)
                    a[lane / 4 + r % 2 * 8][lane % 4 * 2 + odd + r / 2 * 8] =
                        widen(uint16_t(operand.a[r] >> odd * 16));
                for (unsigned r = 0; r < 2; r++)
                    b[lane % 4 * 2 + odd + r * 8][lane / 4] = widen(uint16_t(operand.b[r] >> odd * 16));
            }
        }
        float sum[16][8] = {};
        for (unsigned i = 0; i < 16; i++)
            for (unsigned k = 0; k < 16; k++)
                for (unsigned j = 0; j < 8; j++) sum[i][j] += a[i][k] * b[k][j];
        for (unsigned lane = 0; lane < machine::LANES; lane++) {
            const Operand& operand = *(const Operand*)operands[lane];
            for (unsigned e = 0; e < 4; e++)
                operand.d[e] += sum[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2];
        }
    });
}

static unsigned shared_address(unsigned at) { return at; }

static void check_shared_memory() {}

static void products_will_read() {
    if (!WGMMA) return;
    for (uint16_t& writer : machine::unseen)
        if (writer == 1 + machine::current) writer = 0;
}

static void arrivals_init(unsigned at, unsigned count) {
    machine::check_shared(at, 8);
    machine::arrivals.push_back({at, count, 0, 0, {}});
}
// After the last arrival, the waiting threads may run before the thread that arrived last.
static void arrive(unsigned at) {
    machine::arrive_at(at);
    if (machine::others_first && !_setjmp(machine::threads[machine::current].at)) _longjmp(machine::home, 1);
}
static void arrive_after_copies(unsigned at) {
    machine::Thread& thread = machine::threads[machine::current];
    machine::landings.push_back({at, machine::current, thread.copies});
    thread.copies.clear();
}
static void wait_for_arrivals(unsigned at, unsigned parity) {
    machine::Arrivals& of = machine::arrivals_at(at);
    if (of.phase % 2 != parity) return;
    of.waiting.push_back(machine::current);
    machine::wait();
}
// Makes the copies visible to products. This thread has waited for them.
static void products_will_read_arrived() {
    for (uint16_t& writer : machine::unseen)
        if (writer > machine::ATTENDING_THREADS) writer = 0;
}
static void registers_of_copying() {}
static void registers_of_attending() {}

// A value of a matrix that `wgmma` is told of: lines of 128 bytes in blocks of eight, of which the address'
// bits 7 to 9 swap bits 4 to 6. Without `by_rows` value k of line n; with it value n of line k.
static float value_at(uint64_t matrix, unsigned n, unsigned k, bool by_rows) {
    if (matrix >> 62 != 1) machine::fail("not the swapping of 128 bytes");
    uint64_t at = (matrix & 0x3fff) << 4, leading = (matrix >> 16 & 0x3fff) << 4, stride = (matrix >> 32 & 0x3fff) << 4;
    at += by_rows ? n / 64 * leading + n % 64 * 2 + k / 8 * stride + k % 8 * 128 : n / 8 * stride + n % 8 * 128 + k * 2;
    at ^= (at >> 7 & 7) << 4;
    machine::check_shared(at, 2);
    if (machine::unseen[at / 16]) machine::fail("wgmma reads what it may not see yet");
    uint16_t bits;
    memcpy(&bits, &machine::shared[at], 2);
    return widen(bits);
}

// A warp's sixteen rows of a product; `operands` are the lanes' products.
static void finish(const machine::Product* const* products) {
    const machine::Product& first = *products[0];
    unsigned row = machine::current / machine::LANES % 4 * 16;
    static float a[16][16], b[256][16];
    for (unsigned k = 0; k < 16; k++) {
        for (unsigned i = 0; i < 16 && !first.kept; i++) a[i][k] = value_at(first.a, row + i, k, false);
        for (unsigned j = 0; j < first.columns; j++) b[j][k] = value_at(first.b, j, k, first.b_is_by_rows);
    }
    for (unsigned lane = 0; lane < machine::LANES && first.kept; lane++)
        for (unsigned r = 0; r < 4; r++)
            for (unsigned odd = 0; odd < 2; odd++)
                a[lane / 4 + r % 2 * 8][lane % 4 * 2 + odd + r / 2 * 8] =
                    widen(uint16_t(products[lane]->kept[r] >> odd * 16));
    for (unsigned lane = 0; lane < machine::LANES; lane++) {
        const machine::Product& product = *products[lane];
        if (product.a != first.a || product.b != first.b || product.columns != first.columns)
            machine::fail("lanes of a warpgroup multiply different matrices");
        for (unsigned e = 0; e < first.columns / 2; e++) {
            unsigned i = lane / 4 + e / 2 % 2 * 8, j = e / 4 * 8 + lane % 4 * 2 + e % 2;
            float sum = 0.0f;
            for (unsigned k = 0; k < 16; k++) sum += a[i][k] * b[j][k];
            product.d[e] = product.adds ? product.d[e] + sum : sum;
        }
    }
}

// The first groups that the warp has begun, in their order: all but the last `later` ones.
static void finish_products(unsigned later) {
    typedef std::vector<machine::Product> Products;
    Products& own = machine::threads[machine::current].products;
    unsigned last = machine::threads[machine::current].groups - later;
    struct Operand {
        Products* products;
        size_t count;
    } operand = {&own, 0};
    while (operand.count < own.size() && own[operand.count].group < last) operand.count++;
    machine::together("wgmma", &operand, [](const void** operands) {
        size_t count = ((const Operand*)operands[0])->count;
        for (size_t at = 0; at < count; at++) {
            const machine::Product* products[machine::LANES];
            for (unsigned lane = 0; lane < machine::LANES; lane++) {
                const Operand& of = *(const Operand*)operands[lane];
                if (of.count != count) machine::fail("lanes of a warp have begun different products");
                products[lane] = &(*of.products)[at];
            }
            finish(products);
        }
    });
    own.erase(own.begin(), own.begin() + operand.count);
}

static void products_begin() {}
static void products_end_group() { machine::threads[machine::current].groups++; }
template <unsigned LATER> static void products_wait() { finish_products(LATER); }
template <unsigned LATER, unsigned COUNT> static void products_wait(float (&)[COUNT]) { finish_products(LATER); }

static void begin_product(machine::Product product) {
    machine::Thread& thread = machine::threads[machine::current];
    product.group = thread.groups;
    thread.products.push_back(product);
    // Where copies land late, products read as early as they may: as if their group had ended and were
    // waited for. Where copies land early, products read as late as they may.
    if (!machine::copies_land_early) {
        thread.groups++;
        finish_products(0);
        thread.groups--;
    }
}
static void multiply_32(float (&d)[16], uint64_t a, uint64_t b, bool adds) {
    begin_product({d, a, b, 32, false, adds, 0, nullptr});
}
static void multiply_32(float (&d)[16], const unsigned (&a)[4], uint64_t b, bool adds) {
    begin_product({d, 0, b, 32, false, adds, 0, a});
}
static void multiply_256(float (&d)[128], uint64_t a, uint64_t b, bool adds) {
    begin_product({d, a, b, 256, true, adds, 0, nullptr});
}

static unsigned pack(float low, float high) {
    if (DTYPE == 1) return machine::round_f16(low) | unsigned(machine::round_f16(high)) << 16;
    return machine::round_bf16(low) | unsigned(machine::round_bf16(high)) << 16;
}

static unsigned multiply_bf16x2(unsigned a, unsigned b) {
    float low = machine::widen_bf16(uint16_t(a)) * machine::widen_bf16(uint16_t(b));
    float high = machine::widen_bf16(uint16_t(a >> 16)) * machine::widen_bf16(uint16_t(b >> 16));
    return machine::round_bf16(low) | unsigned(machine::round_bf16(high)) << 16;
}

static float power_of_2(float exponent) { return std::exp2(exponent); }
static float float_of_bits(unsigned bits) { return machine::of_bits(bits); }
static float larger(float a, float b) { return std::fmax(a, b); }
static float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }

#include "../../src/cuda/layout.cu"

#include "../../src/cuda/partial.cu"

#include "../../src/cuda/merge.cu"

struct Launch {
    const Job* jobs;
    const Work* works;
    u64 part_o, part_m, part_l;
    void (*merge)(const Job*, u64, u64, u64);
};
static Launch launch;

extern "C" {

// Memory that the next launches may read and write.
void emulate_memory(u64 from, u64 bytes) { machine::memories.push_back({from, from + bytes}); }
void emulate_forget(u64, u64) { machine::memories.clear(); }

// Both kernels, one after the other. Returns what went wrong, or null.
const char* emulate(const Job* jobs, u32 job_count, const Work* works, u32 work_count, u32 query_rows_max,
                    u64 part_o, u64 part_m, u64 part_l, u64 seed, u32 copies_land_early) {
    launch = {jobs, works, part_o, part_m, part_l, nullptr};
    machine::random_state = seed;
    machine::copies_land_early = copies_land_early != 0;
    machine::failure[0] = 0;
    machine::body = [] {
        kvasir_partial(launch.jobs, launch.works, launch.part_o, launch.part_m, launch.part_l);
        if (!machine::threads[machine::current].copies.empty()) machine::fail("a copy is never waited for");
    };
    for (u32 x = 0; x < work_count; x++)
        if (!machine::run(THREADS, x, 0, SHARED)) return machine::failure;
    u32 splits = 1;
    for (u32 job = 0; job < job_count; job++) splits = std::max(splits, jobs[job].splits);
    launch.merge = splits <= 4 ? kvasir_merge_4 : splits <= 8 ? kvasir_merge_8 : kvasir_merge_16;
    machine::body = [] { launch.merge(launch.jobs, launch.part_o, launch.part_m, launch.part_l); };
    for (u32 y = 0; y < job_count; y++)
        for (u32 x = 0; x < query_rows_max; x++)
            if (!machine::run(MERGE_THREADS, x, y, 0)) return machine::failure;
    return nullptr;
}
}
