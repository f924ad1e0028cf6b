// An emulated CUDA driver with one GPU, whose kernels run on the CPU in `emulation.cpp`. It has the functions of
// `cuda.h` that `kvasir-cuda` opens for kernels. Every call completes at once, on every stream. A kernel may access
// only memory that was allocated here and not freed. Handles that were not destroyed are counted.

#include "emulation.cpp"

#include <algorithm>
#include <string>

typedef int Result;
typedef void* Handle;

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, LAUNCH_FAILED = 719, NOT_CAPTURED = 900 };

static constexpr int SHARED_LIMIT = 227 << 10;

struct Function {
    const char* name;
    void (*merge)(const Job*, u64, u64, u64);  // null for a partial
    int shared_bytes_max;
};

struct Launched {
    Function* function;
    unsigned x, y, threads, shared_bytes;
    std::vector<u64> arguments;
};

static std::vector<Launched>* captured;
static long live;

static Result run_launch(const Launched& of) {
    static Launched now;
    now = of;
    if (of.shared_bytes > (unsigned)of.function->shared_bytes_max) return INVALID;
    machine::failure[0] = 0;
    machine::body = [] {
        const std::vector<u64>& a = now.arguments;
        if (now.function->merge) return now.function->merge((const Job*)a[0], a[1], a[2], a[3]);
        kvasir_partial((const Job*)a[0], (const Work*)a[1], a[2], a[3], a[4]);
    };
    for (unsigned y = 0; y < of.y; y++)
        for (unsigned x = 0; x < of.x; x++)
            if (!machine::run(of.threads, x, y, of.shared_bytes)) return LAUNCH_FAILED;
    return OK;
}

extern "C" {

// The number of handles that were not destroyed.
long live_handles() { return live; }

Result cuInit(unsigned flags) { return flags ? INVALID : OK; }
Result cuGetErrorString(Result code, const char** text) {
    *text = code == LAUNCH_FAILED ? machine::failure : code == NOT_CAPTURED ? "not while a stream is captured" : "invalid";
    return OK;
}
Result cuDriverGetVersion(int* version) { return *version = 12080, OK; }
Result cuDeviceGetCount(int* count) { return *count = 1, OK; }
Result cuDeviceGet(int* device, int index) { return *device = 40 + index, index ? INVALID : OK; }
Result cuDeviceGetName(char* name, int length, int device) {
    snprintf(name, size_t(length), "a processor");
    return device == 40 ? OK : INVALID;
}
Result cuDeviceGetAttribute(int* value, int which, int device) {
    *value = which == 16 ? 132 : which == 75 ? 9 : which == 76 ? 0 : -1;
    return device == 40 && *value >= 0 ? OK : INVALID;
}
Result cuDevicePrimaryCtxRetain(Handle* context, int device) {
    live++;
    *context = &live;
    return device == 40 ? OK : INVALID;
}
Result cuDevicePrimaryCtxRelease_v2(int device) { return live--, device == 40 ? OK : INVALID; }
Result cuCtxSetCurrent(Handle context) { return context == &live ? OK : INVALID; }

Result cuModuleLoadData(Handle* module, const void* image) {
    live++;
    *module = new std::string((const char*)image);
    return OK;
}
Result cuModuleUnload(Handle module) { return live--, delete (std::string*)module, OK; }
Result cuModuleGetFunction(Handle* function, Handle module, const char* name) {
    static Function functions[] = {{"kvasir_partial", nullptr, 48 << 10},
                                   {"kvasir_merge_4", kvasir_merge_4, 48 << 10},
                                   {"kvasir_merge_8", kvasir_merge_8, 48 << 10},
                                   {"kvasir_merge_16", kvasir_merge_16, 48 << 10}};
    for (Function& of : functions)
        if (module && !strcmp(name, of.name)) return *function = &of, OK;
    return NOT_FOUND;
}
Result cuFuncSetAttribute(Handle function, int which, int value) {
    if (which != 8 || value > SHARED_LIMIT) return INVALID;
    ((Function*)function)->shared_bytes_max = value;
    return OK;
}
struct LaunchAttribute {
    int id, padding;
    int value[16];
};
struct LaunchConfig {
    unsigned grid[3], block[3], shared_bytes;
    Handle stream;
    const LaunchAttribute* attributes;
    unsigned attribute_count;
};
Result cuLaunchKernelEx(const LaunchConfig* of, Handle function, void** arguments, void** extra) {
    if (!of->grid[0] || of->grid[1] - 1 > 65534 || of->grid[2] != 1) return INVALID;
    if (of->block[1] != 1 || of->block[2] != 1 || !of->stream || extra) return INVALID;
    // A merge may start before the partials complete: it waits for them.
    unsigned overlaps = ((Function*)function)->merge && OVERLAPS;
    if (of->attribute_count != overlaps) return INVALID;
    if (overlaps && (of->attributes[0].id != 6 || of->attributes[0].value[0] != 1)) return INVALID;
    Launched launched = {(Function*)function, of->grid[0], of->grid[1], of->block[0], of->shared_bytes, {}};
    for (int i = 0; i < (launched.function->merge ? 4 : 5); i++)
        launched.arguments.push_back(*(const u64*)arguments[i]);
    if (!captured) return run_launch(launched);
    captured->push_back(launched);
    return OK;
}

Result cuMemAlloc_v2(u64* address, size_t bytes) {
    if (!bytes) return INVALID;
    void* memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!memory) return OUT_OF_MEMORY;
    live++;
    memset(memory, 0xff, bytes);
    *address = (u64)memory;
    machine::memories.push_back({*address, *address + bytes});
    return OK;
}
Result cuMemFree_v2(u64 address) {
    auto& all = machine::memories;
    auto is_it = [=](const machine::Memory& memory) { return memory.from == address; };
    auto found = std::find_if(all.begin(), all.end(), is_it);
    if (found == all.end()) return INVALID;
    all.erase(found);
    free((void*)address);
    return live--, OK;
}
Result cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, Handle stream) {
    if (captured) return NOT_CAPTURED;
    return memcpy((void*)to, from, bytes), stream ? OK : INVALID;
}
Result cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, Handle stream) {
    if (captured) return NOT_CAPTURED;
    return memcpy(to, (const void*)from, bytes), stream ? OK : INVALID;
}

Result cuStreamCreate(Handle* stream, unsigned flags) {
    live++;
    *stream = &machine::failure;
    return flags == 1 ? OK : INVALID;
}
Result cuStreamDestroy_v2(Handle) { return live--, OK; }
Result cuStreamSynchronize(Handle) { return captured ? NOT_CAPTURED : OK; }
Result cuStreamBeginCapture_v2(Handle, int mode) {
    if (captured || mode != 1) return INVALID;
    live++;
    captured = new std::vector<Launched>;
    return OK;
}
Result cuStreamEndCapture(Handle, Handle* graph) {
    if (!captured) return INVALID;
    *graph = captured;
    captured = nullptr;
    return OK;
}
Result cuGraphInstantiateWithFlags(Handle* executable, Handle graph, u64 flags) {
    live++;
    *executable = new std::vector<Launched>(*(std::vector<Launched>*)graph);
    return flags ? INVALID : OK;
}
Result cuGraphLaunch(Handle executable, Handle) {
    for (const Launched& launched : *(std::vector<Launched>*)executable)
        if (Result failed = run_launch(launched)) return failed;
    return OK;
}
Result cuGraphDestroy(Handle graph) { return live--, delete (std::vector<Launched>*)graph, OK; }
Result cuGraphExecDestroy(Handle executable) { return cuGraphDestroy(executable); }

Result cuEventCreate(Handle* event, unsigned) { return live++, *event = new int(0), OK; }
Result cuEventRecord(Handle event, Handle) { return *(int*)event = 1, OK; }
Result cuEventSynchronize(Handle event) { return *(int*)event ? OK : INVALID; }
Result cuEventElapsedTime(float* ms, Handle begin, Handle end) {
    *ms = 0.5f;
    return *(int*)begin && *(int*)end ? OK : INVALID;
}
Result cuEventDestroy_v2(Handle event) { return live--, delete (int*)event, OK; }
}
