// An emulated CUDA driver with two GPUs, whose memory is files in the memory of the host. It has the functions of
// `cuda.h` that `kvasir-cuda` opens for copies and for sharing. Copies are done when a caller waits for their stream,
// and not before, as a GPU may do it. Mappings and handles that were not released are counted.
//
// A handle names a part of a file that a process has open: "KVSRGPU1", then four numbers of 8 bytes (the process, its
// file, the offset of the part, and its length in bytes).

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

typedef int Result;
typedef void* Handle;
typedef uint64_t u64;

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_MAPPED = 211, REGISTERED = 712, NOT_REGISTERED = 713, LAUNCH_FAILED = 719 };

struct IpcHandle {
    char magic[8];
    u64 process, file, offset, bytes, unused[3];
};
static_assert(sizeof(IpcHandle) == 64, "as CUDA has it");

struct Mapping {
    size_t bytes;
    int file;
};

struct Copy {
    void* to;
    const void* from;
    size_t bytes;
};

struct Stream {
    std::vector<Copy> copies;
};

static std::mutex lock;
static std::map<u64, Mapping> mappings;
static std::map<void*, size_t> registered;
static long live;
static bool copies_fail;
static std::atomic<bool> copies_held;
static std::atomic<int> held_now;

static Result map(int file, size_t offset, size_t bytes, bool keeps_file, u64* address) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, off_t(offset));
    if (memory == MAP_FAILED) return OUT_OF_MEMORY;
    mappings[u64(memory)] = {bytes, keeps_file ? file : -1};
    live++;
    return *address = u64(memory), OK;
}

static Result unmap(u64 address) {
    auto found = mappings.find(address);
    if (found == mappings.end()) return INVALID;
    munmap((void*)address, found->second.bytes);
    if (found->second.file >= 0) close(found->second.file);
    mappings.erase(found);
    return live--, OK;
}

static bool is_mapped(u64 address, size_t bytes) {
    auto after = mappings.upper_bound(address);
    if (after == mappings.begin()) return false;
    auto found = --after;
    return address + bytes <= found->first + found->second.bytes;
}

static Result later(Handle stream, void* to, const void* from, size_t bytes) {
    if (!stream) return INVALID;
    return ((Stream*)stream)->copies.push_back({to, from, bytes}), OK;
}

extern "C" {

// The number of mappings and handles that were not released.
long live_handles() { return live; }
// Copies that are waited for from now on fail, or do not.
void set_copies_fail(int fail) { copies_fail = fail; }
// Copies that are waited for go on when this is taken back, and not before.
void set_copies_held(int hold) { copies_held = hold; }
// The number of streams whose callers wait because of that.
int copies_held_now() { return held_now; }
// Bytes of the host that are registered.
size_t registered_bytes() {
    std::lock_guard<std::mutex> guard(lock);
    size_t bytes = 0;
    for (auto& one : registered) bytes += one.second;
    return bytes;
}

Result cuInit(unsigned flags) { return flags ? INVALID : OK; }
Result cuGetErrorString(Result code, const char** text) {
    *text = code == LAUNCH_FAILED ? "unspecified launch failure" : "invalid argument";
    return OK;
}
Result cuDriverGetVersion(int* version) { return *version = 12080, OK; }
Result cuDeviceGetCount(int* count) { return *count = 2, OK; }
Result cuDeviceGet(int* device, int index) { return *device = 40 + index, index > 1 ? INVALID : OK; }
Result cuDeviceGetName(char* name, int length, int device) {
    snprintf(name, size_t(length), "files %d", device);
    return OK;
}
Result cuDeviceGetAttribute(int* value, int which, int) {
    *value = which == 16 ? 132 : which == 75 ? 9 : which == 76 ? 0 : which == 124 ? 1 : -1;
    return *value >= 0 ? OK : INVALID;
}
Result cuDeviceGetUuid(unsigned char* uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(device + i);
    return OK;
}
Result cuDevicePrimaryCtxRetain(Handle* context, int) { return live++, *context = &live, OK; }
Result cuDevicePrimaryCtxRelease_v2(int) { return live--, OK; }
Result cuCtxSetCurrent(Handle context) { return context == &live ? OK : INVALID; }

Result cuMemAlloc_v2(u64* address, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    int file = memfd_create("emulated GPU", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, off_t(bytes))) return OUT_OF_MEMORY;
    return map(file, 0, bytes, true, address);
}
Result cuMemFree_v2(u64 address) {
    std::lock_guard<std::mutex> guard(lock);
    return unmap(address);
}
Result cuMemGetAddressRange_v2(u64* base, size_t* bytes, u64 address) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = mappings.find(address);
    if (found == mappings.end()) return INVALID;
    return *base = address, *bytes = found->second.bytes, OK;
}
Result cuIpcGetMemHandle(IpcHandle* handle, u64 address) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = mappings.find(address);
    if (found == mappings.end() || found->second.file < 0) return INVALID;
    *handle = {{'K', 'V', 'S', 'R', 'G', 'P', 'U', '1'}, u64(getpid()), u64(found->second.file), 0, found->second.bytes, {}};
    return OK;
}
Result cuIpcOpenMemHandle_v2(u64* address, IpcHandle handle, unsigned flags) {
    std::lock_guard<std::mutex> guard(lock);
    if (memcmp(handle.magic, "KVSRGPU1", 8) || flags != 1) return INVALID;
    char path[64];
    snprintf(path, sizeof path, "/proc/%llu/fd/%llu", (unsigned long long)handle.process, (unsigned long long)handle.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return NOT_MAPPED;
    Result mapped = map(file, handle.offset, handle.bytes, false, address);
    close(file);
    return mapped;
}
Result cuIpcCloseMemHandle(u64 address) { return cuMemFree_v2(address); }

Result cuMemHostRegister_v2(void* memory, size_t bytes, unsigned) {
    std::lock_guard<std::mutex> guard(lock);
    if (!registered.insert({memory, bytes}).second) return REGISTERED;
    return live++, OK;
}
Result cuMemHostUnregister(void* memory) {
    std::lock_guard<std::mutex> guard(lock);
    if (!registered.erase(memory)) return NOT_REGISTERED;
    return live--, OK;
}

Result cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, Handle stream) {
    std::lock_guard<std::mutex> guard(lock);
    return is_mapped(to, bytes) ? later(stream, (void*)to, from, bytes) : INVALID;
}
Result cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, Handle stream) {
    std::lock_guard<std::mutex> guard(lock);
    return is_mapped(from, bytes) ? later(stream, to, (const void*)from, bytes) : INVALID;
}
Result cuStreamCreate(Handle* stream, unsigned flags) {
    live++;
    *stream = new Stream;
    return flags == 1 ? OK : INVALID;
}
Result cuStreamDestroy_v2(Handle stream) { return live--, delete (Stream*)stream, OK; }
Result cuStreamSynchronize(Handle stream) {
    std::vector<Copy> copies;
    std::swap(copies, ((Stream*)stream)->copies);
    if (!copies.empty() && copies_held) {
        held_now++;
        while (copies_held) usleep(500);
        held_now--;
    }
    if (copies_fail) return copies.empty() ? OK : LAUNCH_FAILED;
    for (const Copy& copy : copies) memcpy(copy.to, copy.from, copy.bytes);
    return OK;
}
}
