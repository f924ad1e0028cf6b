// What the machine does, and how a compiler is told to do it.

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define KERNEL extern "C" __global__
#define BOUNDS __launch_bounds__(THREADS, 1)
#define MERGE_BOUNDS(ctas) __launch_bounds__(MERGE_THREADS, MERGE_PASSES == 1 ? ctas : 1)
#define UNROLL _Pragma("unroll")
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
// What is there, or else another value, without a branch.
DEVICE u32 load_global_where(bool is_there, u64 at, u32 value) {
    asm volatile("{\n.reg .pred there;\nsetp.ne.u32 there, %2, 0;\n@there ld.global.u32 %0, [%1];\n}"
                 : "+r"(value)
                 : "l"(at), "r"((u32)is_there));
    return value;
}
DEVICE u64 load_address_where(bool is_there, u64 at) {
    u64 value = 0;
    asm volatile("{\n.reg .pred there;\nsetp.ne.u32 there, %2, 0;\n@there ld.global.u64 %0, [%1];\n}"
                 : "+l"(value)
                 : "l"(at), "r"((u32)is_there));
    return value;
}

// It will be read.
DEVICE void fetch_ahead(u64 at) { asm volatile("prefetch.global.L1 [%0];" ::"l"(at)); }

// 16 bytes from global to shared memory, later; those from `bytes` on become zero.
DEVICE void copy_16(u32 at, u64 from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(at)), "l"(from),
                 "r"(bytes)
                 : "memory");
}
DEVICE void copies_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All groups of this thread have landed.
DEVICE void copies_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

#if OVERLAPS
// The merge of this launch may begin, which waits for the whole of it before it reads.
DEVICE void merge_may_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_parts() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
DEVICE void merge_may_begin() {}
DEVICE void wait_for_parts() {}
#endif

DEVICE void barrier_all() { __syncthreads(); }
DEVICE void barrier_of(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE float shuffle_xor(float value, u32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE float shuffle(float value, u32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
// The same value in all lanes, which the compiler then keeps once for the warp.
DEVICE u32 of_warp(u32 value) { return __shfl_sync(0xffffffffu, value, 0); }
DEVICE bool any_lane(bool value) { return __any_sync(0xffffffffu, value); }
// Of which lanes it is true, a bit for each.
DEVICE u32 which_lanes(bool value) { return __ballot_sync(0xffffffffu, value); }
// The compiler knows nothing of its value, and so computes what follows from it anew.
DEVICE void forget(u64& value) { asm volatile("" : "+l"(value)); }

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
// A count of arrivals in shared memory. A phase ends when `count` have arrived, and another begins.
DEVICE void arrivals_init(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(at)), "r"(count) : "memory");
}
DEVICE void arrive(u32 at) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(shared_address(at))
                 : "memory");
}
// Arrives when all copies that this thread has begun have landed.
DEVICE void arrive_after_copies(u32 at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(at)) : "memory");
}
// Waits for the end of the phase of this parity: 0 for the first, 1 for the second, 0 again.
DEVICE void wait_for_arrivals(u32 at, u32 parity) {
    asm volatile(
        "{\n.reg .pred ended;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
        "@!ended bra again;\n}" ::"r"(shared_address(at)),
        "r"(parity)
        : "memory");
}
// What was copied before the arrivals that this thread has waited for is seen by its products.
DEVICE void products_will_read_arrived() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Registers go from the warpgroup that copies to those that attend.
DEVICE void registers_of_copying() { asm volatile("setmaxnreg.dec.sync.aligned.u32 56;"); }
DEVICE void registers_of_attending() { asm volatile("setmaxnreg.inc.sync.aligned.u32 224;"); }
#if DTYPE == F16
#define WGMMA_TYPES "f16.f16"
#else
#define WGMMA_TYPES "bf16.bf16"
#endif
// What this thread has written to shared memory is seen by products that begin after a barrier.
DEVICE void products_will_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_end_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All groups but the last `LATER` ones are done.
template <u32 LATER> DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}
// The same, and `d`, which they add to, is not looked at before.
template <u32 LATER, u32 COUNT> DEVICE void products_wait(float (&d)[COUNT]) {
    products_wait<LATER>();
    UNROLL for (u32 e = 0; e < COUNT; e++) asm volatile("" : "+f"(d[e])::"memory");
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
// The same with this warp's 16 rows of a in registers, as `mma` has them.
DEVICE void multiply_32(float (&d)[16], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." WGMMA_TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, %20, adds, 1, 1, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
          "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)adds));
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
