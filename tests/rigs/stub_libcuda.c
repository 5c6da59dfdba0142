/* A driver without a GPU: the calls of libcuda that ODC makes, with NVIDIA's own prototypes (cuda.h), on host memory.

   Device memory is a memfd, an IPC handle names it by process and descriptor. What a stream is told to write it writes
   at once, and a wait returns when the word is there: who calls decides which thread is a stream.

   Every call is written to the file of ODC_STUB_CUDA_LOG: nanoseconds, name, arguments, result. What a driver would
   refuse, or punish later, is refused here and marked "WRONG": flags that do not exist, words that are not aligned or
   that the device does not know (registered host memory has another address on the device than on the host, as drivers
   are free to have it), streams that were not created, handles opened by their maker, things given back twice.
   ODC_STUB_CUDA_FAIL="name:code" makes every call of that name fail; with ODC_STUB_CUDA_NO_PEERS devices do not reach
   each other, with ODC_STUB_CUDA_NO_ATOMICS the link between them has none. */

#define _GNU_SOURCE
#include <cuda.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MOST 4096
#define LEAD 4096 /* an allocation begins so far into what its handle names */
#define WAIT_LIMIT_S 20

enum kind { ALLOCATED = 1, OPENED, REGISTERED, STREAM };
static const char *const kind_names[] = {"", "allocated", "opened", "registered", "streams"};

struct thing {
    enum kind kind;
    uintptr_t key;    /* what gives it back: an address or a handle */
    uintptr_t begin;  /* where the device sees it */
    size_t size;
    void *mapping;
    size_t mapped;
    int fd;
    unsigned flags;
};

struct handle {
    char magic[8];
    uint64_t pid, fd, size;
};

static struct thing things[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *out;
static uintptr_t last_stream = 0x5000;

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
}

__attribute__((format(printf, 3, 4)))
static CUresult said(CUresult code, const char *name, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (!out && getenv("ODC_STUB_CUDA_LOG"))
        out = fopen(getenv("ODC_STUB_CUDA_LOG"), "a");
    if (out) {
        fprintf(out, "%llu %s %s -> %d\n", (unsigned long long)now(), name, text, code);
        fflush(out);
    }
    return code;
}

#define WRONG(name, ...) said(CUDA_ERROR_INVALID_VALUE, name, "WRONG " __VA_ARGS__)

static CUresult told_to_fail(const char *name) {
    const char *text = getenv("ODC_STUB_CUDA_FAIL");
    size_t length = strlen(name);
    return text && !strncmp(text, name, length) && text[length] == ':' ? (CUresult)atoi(text + length + 1) : CUDA_SUCCESS;
}

#define ENTER(name)                                      \
    pthread_mutex_lock(&lock);                           \
    CUresult code = told_to_fail(name);                  \
    if (code) {                                          \
        pthread_mutex_unlock(&lock);                     \
        return said(code, name, "as told");              \
    }
#define LEAVE(result)                                    \
    do {                                                 \
        code = (result);                                 \
        pthread_mutex_unlock(&lock);                     \
        return code;                                     \
    } while (0)

static struct thing *find(enum kind kind, uintptr_t key) {
    for (int i = 0; i < MOST; i++)
        if (things[i].kind == kind && things[i].key == key)
            return &things[i];
    return NULL;
}

static struct thing *keep(struct thing thing) {
    for (int i = 0; i < MOST; i++)
        if (!things[i].kind) {
            things[i] = thing;
            return &things[i];
        }
    abort();
}

static struct thing *device_range(uintptr_t address, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (things[i].kind && things[i].kind != STREAM && things[i].begin <= address &&
            address + size <= things[i].begin + things[i].size)
            return &things[i];
    return NULL;
}

static int is_stream(CUstream stream) {
    return !stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD || find(STREAM, (uintptr_t)stream);
}

/* The device */

CUresult CUDAAPI cuInit(unsigned int flags) { return said(flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS, "cuInit", "flags=%u", flags); }

CUresult CUDAAPI cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return said(CUDA_SUCCESS, "cuDriverGetVersion", "-");
}

CUresult CUDAAPI cuDeviceGetCount(int *count) {
    *count = 2;
    return said(CUDA_SUCCESS, "cuDeviceGetCount", "-");
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING || attribute == CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED ||
             attribute == CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES;
    return said(CUDA_SUCCESS, "cuDeviceGetAttribute", "attribute=%d device=%d value=%d", attribute, device, *value);
}

CUresult CUDAAPI cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to) {
    const char *name = "cuDeviceGetP2PAttribute";
    ENTER(name);
    if (from == to)
        LEAVE(WRONG(name, "a device and itself: %d", from));
    if (attribute < CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK || attribute > CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED)
        LEAVE(WRONG(name, "attribute=%d", attribute));
    *value = getenv("ODC_STUB_CUDA_NO_ATOMICS") == NULL;
    LEAVE(said(CUDA_SUCCESS, name, "attribute=%d from=%d to=%d value=%d", attribute, from, to, *value));
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    *can = device != peer && getenv("ODC_STUB_CUDA_NO_PEERS") == NULL;
    return said(CUDA_SUCCESS, "cuDeviceCanAccessPeer", "device=%d peer=%d", device, peer);
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
    snprintf(id, length, "0000:%02X:00.0", device + 1);
    return said(CUDA_SUCCESS, "cuDeviceGetPCIBusId", "device=%d", device);
}

CUresult CUDAAPI cuDeviceGetByPCIBusId(CUdevice *device, const char *id) {
    unsigned bus = 0;
    if (sscanf(id, "0000:%x:00.0", &bus) != 1 || bus < 1 || bus > 2)
        return said(CUDA_ERROR_INVALID_DEVICE, "cuDeviceGetByPCIBusId", "%s", id);
    *device = bus - 1;
    return said(CUDA_SUCCESS, "cuDeviceGetByPCIBusId", "%s", id);
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "as the stub was told";
    return CUDA_SUCCESS;
}

/* Memory */

CUresult CUDAAPI cuMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = *total = (size_t)1 << 34;
    return said(CUDA_SUCCESS, "cuMemGetInfo", "-");
}

CUresult CUDAAPI cuMemAlloc(CUdeviceptr *address, size_t size) {
    const char *name = "cuMemAlloc";
    ENTER(name);
    size_t mapped = size + 2 * LEAD;
    int fd = memfd_create("stub-device", MFD_CLOEXEC);
    void *mapping = fd < 0 || ftruncate(fd, mapped) ? MAP_FAILED : mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (!size || mapping == MAP_FAILED)
        LEAVE(said(CUDA_ERROR_OUT_OF_MEMORY, name, "size=%zu", size));
    memset(mapping, 0xAB, mapped); /* as dirty as a device's */
    *address = (uintptr_t)mapping + LEAD;
    keep((struct thing){ALLOCATED, *address, (uintptr_t)mapping, mapped, mapping, mapped, fd, 0});
    LEAVE(said(CUDA_SUCCESS, name, "address=%#llx size=%zu", *address, size));
}

static CUresult give_back(const char *name, enum kind kind, uintptr_t key) {
    struct thing *thing = find(kind, key);
    if (!thing)
        return WRONG(name, "address=%#lx was not %s", key, kind_names[kind]);
    if (thing->mapping)
        munmap(thing->mapping, thing->mapped);
    if (thing->fd >= 0)
        close(thing->fd);
    thing->kind = 0;
    return said(CUDA_SUCCESS, name, "address=%#lx", key);
}

CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
    ENTER("cuMemFree");
    LEAVE(give_back("cuMemFree", ALLOCATED, address));
}

CUresult CUDAAPI cuMemsetD8(CUdeviceptr address, unsigned char value, size_t size) {
    ENTER("cuMemsetD8");
    if (!device_range(address, size))
        LEAVE(WRONG("cuMemsetD8", "address=%#llx size=%zu", address, size));
    memset((void *)address, value, size);
    LEAVE(said(CUDA_SUCCESS, "cuMemsetD8", "address=%#llx size=%zu", address, size));
}

CUresult CUDAAPI cuCtxSynchronize(void) { return said(CUDA_SUCCESS, "cuCtxSynchronize", "-"); }

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    ENTER("cuMemGetAddressRange");
    struct thing *thing = device_range(address, 1);
    if (!thing)
        LEAVE(WRONG("cuMemGetAddressRange", "address=%#llx", address));
    if (base)
        *base = thing->begin;
    if (size)
        *size = thing->size;
    LEAVE(said(CUDA_SUCCESS, "cuMemGetAddressRange", "address=%#llx", address));
}

CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    const char *name = "cuIpcGetMemHandle";
    ENTER(name);
    struct thing *thing = device_range(address, 1);
    if (!thing || thing->kind != ALLOCATED)
        LEAVE(WRONG(name, "address=%#llx was not allocated here", address));
    struct handle made = {"stubcuda", getpid(), thing->fd, thing->size};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &made, sizeof made);
    LEAVE(said(CUDA_SUCCESS, name, "address=%#lx", thing->key));
}

CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    const char *name = "cuIpcOpenMemHandle";
    char path[64];
    struct handle made;
    ENTER(name);
    memcpy(&made, &handle, sizeof made);
    if (memcmp(made.magic, "stubcuda", 8) || made.pid == (uint64_t)getpid() || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        LEAVE(WRONG(name, "no handle, or one of this process, or flags=%u", flags));
    snprintf(path, sizeof path, "/proc/%llu/fd/%llu", (unsigned long long)made.pid, (unsigned long long)made.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *mapping = fd < 0 ? MAP_FAILED : mmap(NULL, made.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    if (mapping == MAP_FAILED)
        LEAVE(WRONG(name, "%s: %s", path, strerror(errno)));
    *address = (uintptr_t)mapping;
    keep((struct thing){OPENED, *address, *address, made.size, mapping, made.size, -1, 0});
    LEAVE(said(CUDA_SUCCESS, name, "address=%#llx of=%llu", *address, (unsigned long long)made.pid));
}

CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER("cuIpcCloseMemHandle");
    LEAVE(give_back("cuIpcCloseMemHandle", OPENED, address));
}

CUresult CUDAAPI cuMemHostRegister(void *address, size_t size, unsigned int flags) {
    const char *name = "cuMemHostRegister";
    ENTER(name);
    size_t page = sysconf(_SC_PAGESIZE), into = (uintptr_t)address % page, whole = (into + size + page - 1) / page * page;
    if (!size || flags & ~(unsigned)(CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP) || find(REGISTERED, (uintptr_t)address))
        LEAVE(WRONG(name, "address=%p size=%zu flags=%#x, or registered before", address, size, flags));
    void *alias = mremap((char *)address - into, 0, whole, MREMAP_MAYMOVE); /* the same pages at another address */
    if (alias == MAP_FAILED)
        LEAVE(WRONG(name, "address=%p: %s", address, strerror(errno)));
    keep((struct thing){REGISTERED, (uintptr_t)address, (uintptr_t)alias + into, size, alias, whole, -1, flags});
    LEAVE(said(CUDA_SUCCESS, name, "address=%p size=%zu flags=%#x", address, size, flags));
}

CUresult CUDAAPI cuMemHostUnregister(void *address) {
    ENTER("cuMemHostUnregister");
    LEAVE(give_back("cuMemHostUnregister", REGISTERED, (uintptr_t)address));
}

CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr *found, void *address, unsigned int flags) {
    const char *name = "cuMemHostGetDevicePointer";
    ENTER(name);
    struct thing *thing = find(REGISTERED, (uintptr_t)address);
    if (!thing || flags || !(thing->flags & CU_MEMHOSTREGISTER_DEVICEMAP))
        LEAVE(WRONG(name, "address=%p flags=%u, or not registered and mapped", address, flags));
    *found = thing->begin;
    LEAVE(said(CUDA_SUCCESS, name, "address=%p device=%#llx", address, *found));
}

/* Copies */

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    const char *name = "cuMemcpyAsync";
    ENTER(name);
    if (!is_stream(stream) || !device_range(to, size) || !device_range(from, size))
        LEAVE(WRONG(name, "stream=%p to=%#llx from=%#llx size=%zu", (void *)stream, to, from, size));
    memcpy((void *)to, (void *)from, size);
    LEAVE(said(CUDA_SUCCESS, name, "stream=%p to=%#llx from=%#llx size=%zu", (void *)stream, to, from, size));
}

/* As CUDA 12.8 has it. By this name it stays so; the header means a later one, with a parameter less. */
#undef cuMemcpyBatchAsync
CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
                                    size_t *firsts, size_t num_attributes, size_t *failed, CUstream stream) {
    const char *name = "cuMemcpyBatchAsync";
    ENTER(name);
    if (!stream || !is_stream(stream) || !count || num_attributes != 1 || firsts[0] ||
        attributes->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || attributes->flags > CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        LEAVE(WRONG(name, "stream=%p count=%zu attributes=%zu", (void *)stream, count, num_attributes));
    for (size_t i = count; i--;) { /* in any order */
        *failed = i;
        if (!sizes[i] || !device_range(to[i], sizes[i]) || !device_range(from[i], sizes[i]))
            LEAVE(WRONG(name, "entry %zu: to=%#llx from=%#llx size=%zu", i, to[i], from[i], sizes[i]));
        memcpy((void *)to[i], (void *)from[i], sizes[i]);
    }
    *failed = SIZE_MAX;
    LEAVE(said(CUDA_SUCCESS, name, "stream=%p count=%zu flags=%u", (void *)stream, count, attributes->flags));
}

/* Streams */

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    ENTER("cuStreamCreateWithPriority");
    *stream = (CUstream)(last_stream += 0x10);
    keep((struct thing){STREAM, (uintptr_t)*stream, 0, 0, NULL, 0, -1, flags});
    LEAVE(said(CUDA_SUCCESS, "cuStreamCreateWithPriority", "stream=%p flags=%u priority=%d", (void *)*stream, flags, priority));
}

CUresult CUDAAPI cuStreamDestroy(CUstream stream) {
    ENTER("cuStreamDestroy");
    LEAVE(give_back("cuStreamDestroy", STREAM, (uintptr_t)stream));
}

static CUresult checked(const char *name, CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags, unsigned allowed) {
    ENTER(name);
    if (flags & ~allowed || address % 4 || !is_stream(stream) || !device_range(address, 4))
        LEAVE(WRONG(name, "stream=%p%s address=%#llx%s%s value=%u flags=%#x%s", (void *)stream,
                    is_stream(stream) ? "" : " (unknown)", address, address % 4 ? " (not aligned)" : "",
                    device_range(address, 4) ? "" : " (not known to the device)", value, flags, flags & ~allowed ? " (none)" : ""));
    LEAVE(said(CUDA_SUCCESS, name, "stream=%p address=%#llx value=%u flags=%#x", (void *)stream, address, value, flags));
}

static CUresult await(const char *name, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    uint64_t deadline = now() + WAIT_LIMIT_S * 1000000000ull;
    for (;;) {
        cuuint32_t seen = __atomic_load_n((cuuint32_t *)address, __ATOMIC_ACQUIRE);
        switch (flags & ~(unsigned)CU_STREAM_WAIT_VALUE_FLUSH) {
        case CU_STREAM_WAIT_VALUE_GEQ: if ((int32_t)(seen - value) >= 0) return CUDA_SUCCESS; break;
        case CU_STREAM_WAIT_VALUE_EQ: if (seen == value) return CUDA_SUCCESS; break;
        case CU_STREAM_WAIT_VALUE_AND: if (seen & value) return CUDA_SUCCESS; break;
        default: if (~(seen | value)) return CUDA_SUCCESS;
        }
        if (now() > deadline)
            return WRONG(name, "waited %d s for %u, saw %u", WAIT_LIMIT_S, value, seen);
        usleep(20);
    }
}

CUresult CUDAAPI cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    CUresult code = checked("cuStreamWaitValue32", stream, address, value, flags, 3 | CU_STREAM_WAIT_VALUE_FLUSH);
    return code ? code : await("cuStreamWaitValue32", address, value, flags);
}

CUresult CUDAAPI cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    CUresult code = checked("cuStreamWriteValue32", stream, address, value, flags, CU_STREAM_WRITE_VALUE_DEFAULT);
    if (!code)
        __atomic_store_n((cuuint32_t *)address, value, __ATOMIC_RELEASE);
    return code;
}

CUresult CUDAAPI cuStreamBatchMemOp(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *operations, unsigned int flags) {
    const char *name = "cuStreamBatchMemOp";
    if (!count || count > 256 || flags)
        return WRONG(name, "count=%u flags=%u", count, flags);
    said(CUDA_SUCCESS, name, "stream=%p count=%u", (void *)stream, count);
    for (unsigned i = 0; i < count; i++) {
        CUstreamBatchMemOpParams *one = &operations[i];
        CUresult code;
        if (one->operation == CU_STREAM_MEM_OP_WAIT_VALUE_32)
            code = cuStreamWaitValue32(stream, one->waitValue.address, one->waitValue.value, one->waitValue.flags);
        else if (one->operation == CU_STREAM_MEM_OP_WRITE_VALUE_32)
            code = cuStreamWriteValue32(stream, one->writeValue.address, one->writeValue.value, one->writeValue.flags);
        else
            code = WRONG(name, "operation %d of entry %u", one->operation, i);
        if (code)
            return code;
    }
    return CUDA_SUCCESS;
}

/* The layout that callers without a C compiler have to know. */
_Static_assert(sizeof(CUstreamBatchMemOpParams) == 48, "an entry");
_Static_assert(offsetof(CUstreamBatchMemOpParams, waitValue.address) == 8, "address");
_Static_assert(offsetof(CUstreamBatchMemOpParams, waitValue.value) == 16, "value");
_Static_assert(offsetof(CUstreamBatchMemOpParams, waitValue.flags) == 24, "flags");
_Static_assert(offsetof(CUstreamBatchMemOpParams, writeValue.flags) == 24, "flags");
_Static_assert(sizeof(CUmemcpyAttributes) == 24 && offsetof(CUmemcpyAttributes, flags) == 20, "attributes");

/* What this process has not given back. */
void stub_leftovers(void);
void stub_leftovers(void) {
    for (int kind = ALLOCATED; kind <= STREAM; kind++) {
        int left = 0;
        for (int i = 0; i < MOST; i++)
            left += things[i].kind == (enum kind)kind;
        said(CUDA_SUCCESS, "left", "%s=%d", kind_names[kind], left);
    }
}
