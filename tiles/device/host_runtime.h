/* Host side of one compiled CUDA kernel: argument checks, module loading, tensor maps, launches.
 *
 * Included by a generated host.c, which first defines TB_PROGRAM, TB_ARCH, TB_PARAM_NAMES, and the counts TB_PARAMS, TB_SYMBOLS and
 * TB_KERNELS. It is plain C11 over tvm_ffi's C API, so that it compiles in a fraction of a second, and it declares the few driver types it needs: building and loading
 * the library takes neither a CUDA toolkit nor a GPU; libcuda.so.1 is opened at the first launch. */
#ifndef TILEBIT_HOST_RUNTIME_H_
#define TILEBIT_HOST_RUNTIME_H_

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <tvm/ffi/extra/c_env_api.h>

#define TB_MAX_DEVICES 64
#define TB_FIRST_ADDRESS 65536 /* below it nothing has memory: a view of a freed storage is its offset from null */
#define TB_MAP_SLOTS 32 /* a power of two: cached descriptors per tensor map and thread: one per layer that shares the kernel */
#define TB_STRING_(x) #x
#define TB_STRING(x) TB_STRING_(x)

/* ---- the driver's ABI (cuda.h), as far as it is used ---- */
typedef int CUresult;
typedef int CUdevice;
typedef void* CUcontext;
typedef void* CUmodule;
typedef void* CUfunction;
typedef void* CUstream;
typedef struct { _Alignas(64) uint64_t opaque[16]; } CUtensorMap;
typedef struct { uint32_t id; uint32_t pad; union { char bytes[64]; uint32_t dim[3]; int32_t flag; uint64_t align; } value; } CUlaunchAttribute;
typedef struct {
  uint32_t grid[3], block[3], smem;
  CUstream stream;
  CUlaunchAttribute* attributes;
  uint32_t num_attributes;
} CUlaunchConfig;
enum { TB_ATTRIBUTE_CLUSTER = 4, TB_ATTRIBUTE_DEPENDENT = 6, TB_FUNC_MAX_DYNAMIC_SMEM = 8, TB_DEVICE_MAJOR = 75, TB_DEVICE_MINOR = 76 };
enum { TB_CAPTURE_RELAXED = 2 };

#define TB_DRIVER(X)                                                                                                  \
  X(cuInit, (unsigned))                                                                                               \
  X(cuDeviceGet, (CUdevice*, int))                                                                                    \
  X(cuDeviceGetAttribute, (int*, int, CUdevice))                                                                      \
  X(cuDevicePrimaryCtxRetain, (CUcontext*, CUdevice))                                                                 \
  X(cuCtxGetCurrent, (CUcontext*))                                                                                    \
  X(cuCtxPushCurrent_v2, (CUcontext))                                                                                 \
  X(cuCtxPopCurrent_v2, (CUcontext*))                                                                                 \
  X(cuModuleLoadData, (CUmodule*, const void*))                                                                       \
  X(cuModuleGetFunction, (CUfunction*, CUmodule, const char*))                                                        \
  X(cuFuncSetAttribute, (CUfunction, int, int))                                                                       \
  X(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**)) \
  X(cuLaunchKernelEx, (const CUlaunchConfig*, CUfunction, void**, void**))                                            \
  X(cuGetErrorName, (CUresult, const char**))                                                                         \
  X(cuThreadExchangeStreamCaptureMode, (int*))                                                                        \
  X(cuTensorMapEncodeTiled, (CUtensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,    \
                             const uint32_t*, int, int, int, int))

#define X(name, args) static CUresult(*tb_##name) args;
TB_DRIVER(X)
#undef X

/* ---- errors: one sentence that says what was got, what is accepted, what to do ---- */
static int tb_fail(const char* kind, const char* format, ...) {
  char text[768];
  int used = snprintf(text, sizeof text, "%s: ", TB_PROGRAM);
  va_list list;
  va_start(list, format);
  vsnprintf(text + used, sizeof text - (size_t)used, format, list);
  va_end(list);
  TVMFFIErrorSetRaisedFromCStr(kind, text);
  return -1;
}

static int tb_driver_failed(const char* call, CUresult result, int device) {
  const char* name = NULL;
  if (tb_cuGetErrorName) tb_cuGetErrorName(result, &name);
  return tb_fail("RuntimeError", "%s on device %d returned %d (%s); earlier asynchronous errors surface here too, so rerun with CUDA_LAUNCH_BLOCKING=1 to find the first one",
                 call, device, result, name ? name : "unknown");
}
#define TB_CALL(name, device, ...)                                                     \
  do {                                                                                 \
    CUresult tb_result = tb_##name(__VA_ARGS__);                                       \
    if (tb_result != 0) return tb_driver_failed(#name, tb_result, device);             \
  } while (0)

/* ---- integer expressions of the lowered host function ---- */
static inline int64_t tb_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t tb_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t tb_floordiv(int64_t a, int64_t b) { int64_t q = a / b; return q - ((a % b != 0) && ((a < 0) != (b < 0))); }
static inline int64_t tb_floormod(int64_t a, int64_t b) { return a - tb_floordiv(a, b) * b; }

/* ---- arguments ---- */
typedef struct {
  const char* name;
  const char* dtype;
  uint8_t code, bits;
  int ndim;
  int64_t dims[6]; /* -1: symbolic */
  int fixed;       /* no symbolic dimension: views that keep dimension 0 and the number of elements are accepted */
  int address;     /* may be given by its address alone */
  int apart;       /* rows, along dimension 0, may lie any multiple of 16 bytes apart */
} tb_param;

static const char* tb_dtype_name(DLDataType t, char* buffer, size_t size) {
  static const char* const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  if (t.code < 7) snprintf(buffer, size, "%s%d", kinds[t.code], t.bits);
  else if (t.code == kDLFloat8_e4m3fn) snprintf(buffer, size, "float8_e4m3fn");
  else snprintf(buffer, size, "type code %d of %d bits", t.code, t.bits);
  return buffer;
}

static void tb_shape_text(const int64_t* dims, int ndim, char* buffer, size_t size) {
  size_t used = (size_t)snprintf(buffer, size, "[");
  for (int j = 0; j < ndim && used < size; ++j) {
    if (dims[j] < 0) used += (size_t)snprintf(buffer + used, size - used, "%s*", j ? ", " : "");
    else used += (size_t)snprintf(buffer + used, size - used, "%s%lld", j ? ", " : "", (long long)dims[j]);
  }
  if (used < size) snprintf(buffer + used, size - used, "]");
}

static int tb_wrong_shape(const tb_param* p, const DLTensor* t) {
  char got[128], accepted[128];
  tb_shape_text(t->shape, t->ndim, got, sizeof got);
  tb_shape_text(p->dims, p->ndim, accepted, sizeof accepted);
  return tb_fail("ValueError", "argument '%s' has shape %s; accepted: %s (*: any length). Use the kernel compiled for this shape", p->name, got, accepted);
}

/* One argument: type, dtype, shape, strides, device. Integers may differ in sign (torch has few unsigned dtypes). */
static int tb_check(const tb_param* p, const TVMFFIAny* any, int device_id, const DLTensor** out) {
  const DLTensor* t;
  if (any->type_index == kTVMFFITensor) t = (const DLTensor*)((const char*)any->v_obj + sizeof(TVMFFIObject));
  else if (any->type_index == kTVMFFIDLTensorPtr) t = (const DLTensor*)any->v_ptr;
  else return tb_fail("TypeError", "argument '%s' is no tensor (type index %d); accepted: a CUDA tensor%s", p->name, any->type_index, p->address ? " or its address" : "");
  *out = t;
  if (t->device.device_type != kDLCUDA)
    return tb_fail("ValueError", "argument '%s' is on device type %d; accepted: a CUDA tensor (type %d). Move it with .cuda()", p->name, (int)t->device.device_type, (int)kDLCUDA);
  if (device_id >= 0 && t->device.device_id != device_id)
    return tb_fail("ValueError", "argument '%s' is on cuda:%d and the first argument on cuda:%d; accepted: all on one device", p->name, t->device.device_id, device_id);
  int same_type = t->dtype.bits == p->bits && t->dtype.lanes == 1 && (t->dtype.code == p->code || (t->dtype.code <= kDLUInt && p->code <= kDLUInt));
  if (!same_type) {
    char got[48];
    return tb_fail("TypeError", "argument '%s' has dtype %s; accepted: %s", p->name, tb_dtype_name(t->dtype, got, sizeof got), p->dtype);
  }
  int exact = t->ndim == p->ndim;
  for (int j = 0; exact && j < p->ndim; ++j) exact = p->dims[j] < 0 || t->shape[j] == p->dims[j];
  int64_t elements = 1;
  for (int j = 0; j < t->ndim; ++j) elements *= t->shape[j];
  if (!exact) {
    int64_t accepted = 1;
    for (int j = 0; j < p->ndim; ++j) accepted *= p->dims[j];
    if (!p->fixed || t->ndim < 1 || p->ndim < 1 || t->shape[0] != p->dims[0] || elements != accepted) return tb_wrong_shape(p, t);
  }
  if (t->strides) {
    int64_t stride = 1;
    for (int j = t->ndim - 1; j >= 0; --j) {
      if (j == 0 && p->apart) {
        if (t->shape[0] > 1 && t->strides[0] * p->bits % 128 != 0 && elements != 0)
          return tb_fail("ValueError", "argument '%s' has rows %lld elements apart; accepted: a multiple of %d (16 bytes). Call .contiguous() first", p->name,
                         (long long)t->strides[0], 128 / p->bits);
      } else if (t->shape[j] != 1 && t->strides[j] != stride && elements != 0)
        return tb_fail("ValueError", "argument '%s' has stride %lld in dimension %d; accepted: contiguous (stride %lld). Call .contiguous() first",
                       p->name, (long long)t->strides[j], j, (long long)stride);
      stride *= t->shape[j];
    }
  }
  if (elements != 0 && (uintptr_t)t->data + t->byte_offset < TB_FIRST_ADDRESS)
    return tb_fail("ValueError", "argument '%s' has no memory: its storage was freed; accepted: a tensor whose storage holds it. Fill the storage again, or pass another tensor", p->name);
  return 0;
}

/* A tensor of the address alone: converting a tensor object costs the caller more than the rest of an argument. How long the memory is, is
 * the caller's promise; its dimension reads as 0. */
static int tb_check_address(const tb_param* p, int64_t address, int device_id, DLTensor* out) {
  static int64_t shape[1] = {0};
  if (address <= 0 || address & 15)
    return tb_fail("ValueError", "argument '%s' is the address %lld; accepted: a 16-byte aligned address above 0 of memory that is long enough, or a CUDA tensor", p->name, (long long)address);
  *out = (DLTensor){.data = (void*)(uintptr_t)address, .device = {kDLCUDA, device_id}, .ndim = 1, .dtype = {p->code, p->bits, 1}, .shape = shape};
  return 0;
}

/* By how many elements the rows of a tensor lie apart; the stride of one row alone may be anything. */
static inline int64_t tb_pitch(const DLTensor* t) {
  if (t->strides && t->shape[0] > 1) return t->strides[0];
  int64_t row = 1;
  for (int j = 1; j < t->ndim; ++j) row *= t->shape[j];
  return row;
}

static inline void* tb_data(const DLTensor* t) { return (char*)t->data + t->byte_offset; }

/* Pointers are used for 16-byte loads and tensor maps. */
static int tb_check_alignment(const tb_param* p, const DLTensor* t) {
  uintptr_t address = (uintptr_t)tb_data(t);
  if (address & 15)
    return tb_fail("ValueError", "argument '%s' starts at an address that is %d bytes past a 16-byte boundary; accepted: 16-byte aligned. Call .clone() on the slice first", p->name, (int)(address & 15));
  return 0;
}

static int tb_wrong_dim(const char* name, int axis, int64_t got, const char* symbol, int64_t expected) {
  return tb_fail("ValueError", "argument '%s' has %lld in dimension %d; accepted: %s = %lld", name, (long long)got, axis, symbol, (long long)expected);
}

/* ---- driver and modules: once per process, once per device ---- */
extern const unsigned char tb_cubin[];
static const char* const tb_kernel_names[TB_KERNELS];
static const int tb_kernel_smem[TB_KERNELS];

typedef struct {
  CUcontext context;
  CUfunction functions[TB_KERNELS];
} tb_device;

static pthread_mutex_t tb_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int tb_ready[TB_MAX_DEVICES];
static tb_device tb_devices[TB_MAX_DEVICES];

static int tb_open_driver(void) {
  static int opened = 0;
  if (opened) return 0;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!library) return tb_fail("RuntimeError", "libcuda.so.1 cannot be opened (%s); a CUDA kernel needs an NVIDIA driver. Install one, or use the CPU", dlerror());
#define X(name, args)                           \
  *(void**)&tb_##name = dlsym(library, #name);
  TB_DRIVER(X)
#undef X
#define X(name, args) \
  if (!tb_##name && strcmp(#name, "cuTensorMapEncodeTiled") && strcmp(#name, "cuLaunchKernelEx")) \
    return tb_fail("RuntimeError", "the NVIDIA driver has no %s; accepted: a driver for CUDA 12.0 or newer. Update it", #name);
  TB_DRIVER(X)
#undef X
  TB_CALL(cuInit, -1, 0);
  opened = 1;
  return 0;
}

static int tb_load_module(int id) {
  tb_device* d = &tb_devices[id];
  CUmodule module;
  CUresult result = tb_cuModuleLoadData(&module, tb_cubin);
  if (result == 209 || result == 218 || result == 200) { /* no binary for the GPU, invalid PTX, invalid image */
    int major = 0, minor = 0;
    CUdevice device;
    if (tb_cuDeviceGet(&device, id) == 0) {
      tb_cuDeviceGetAttribute(&major, TB_DEVICE_MAJOR, device);
      tb_cuDeviceGetAttribute(&minor, TB_DEVICE_MINOR, device);
    }
    return tb_fail("RuntimeError", "compiled for %s, and cuda:%d has compute capability %d.%d; compile the kernel for that device", TB_ARCH, id, major, minor);
  }
  if (result != 0) return tb_driver_failed("cuModuleLoadData", result, id);
  for (int i = 0; i < TB_KERNELS; ++i) {
    TB_CALL(cuModuleGetFunction, id, &d->functions[i], module, tb_kernel_names[i]);
    if (tb_kernel_smem[i] > 0) TB_CALL(cuFuncSetAttribute, id, d->functions[i], TB_FUNC_MAX_DYNAMIC_SMEM, tb_kernel_smem[i]);
  }
  return 0;
}

/* Loading is allowed while another stream of this thread is captured: it enqueues nothing. */
static int tb_prepare_locked(int id) {
  if (atomic_load_explicit(&tb_ready[id], memory_order_relaxed)) return 0;
  if (tb_open_driver() != 0) return -1;
  CUdevice device;
  TB_CALL(cuDeviceGet, id, &device, id);
  TB_CALL(cuDevicePrimaryCtxRetain, id, &tb_devices[id].context, device);
  TB_CALL(cuCtxPushCurrent_v2, id, tb_devices[id].context);
  int mode = TB_CAPTURE_RELAXED;
  tb_cuThreadExchangeStreamCaptureMode(&mode);
  int failed = tb_load_module(id);
  tb_cuThreadExchangeStreamCaptureMode(&mode);
  CUcontext popped;
  tb_cuCtxPopCurrent_v2(&popped);
  if (failed) return -1;
  atomic_store_explicit(&tb_ready[id], 1, memory_order_release);
  return 0;
}

static int tb_prepare(int id) {
  if (id < 0 || id >= TB_MAX_DEVICES) return tb_fail("ValueError", "device is cuda:%d; accepted: 0 to %d", id, TB_MAX_DEVICES - 1);
  if (atomic_load_explicit(&tb_ready[id], memory_order_acquire)) return 0;
  pthread_mutex_lock(&tb_lock);
  int failed = tb_prepare_locked(id);
  pthread_mutex_unlock(&tb_lock);
  return failed;
}

/* ---- tensor maps: encoded again only when the pointer or a symbolic dimension changed ---- */
typedef struct {
  CUtensorMap map;
  void* address; /* NULL: empty */
  int64_t symbols[TB_SYMBOLS + 1];
} tb_map_slot;

/* The top bits of a multiplicative hash: addresses are multiples of large powers of two. */
static inline unsigned tb_slot(uint64_t key) { return (unsigned)((key * 0x9E3779B97F4A7C15ull) >> 40) & (TB_MAP_SLOTS - 1); }

typedef struct {
  int dtype, rank;
  uint64_t dims[5], strides[4];
  uint32_t box[5], steps[5];
  int interleave, swizzle, promotion, fill;
} tb_map_spec;

static int tb_encode(tb_map_slot* slot, const tb_param* p, void* address, const tb_map_spec* s, int device) {
  slot->address = NULL;
  if (!tb_cuTensorMapEncodeTiled) return tb_fail("RuntimeError", "the NVIDIA driver has no cuTensorMapEncodeTiled; accepted: a driver for CUDA 12.0 or newer. Update it");
  CUresult result = tb_cuTensorMapEncodeTiled(&slot->map, s->dtype, (uint32_t)s->rank, address, s->dims, s->strides, s->box, s->steps, s->interleave, s->swizzle, s->promotion, s->fill);
  if (result != 0) {
    const char* name = NULL;
    tb_cuGetErrorName(result, &name);
    return tb_fail("RuntimeError", "cuTensorMapEncodeTiled on device %d returned %d (%s) for argument '%s' at %p; this is a defect of the schedule: report it with the kernel's manifest", device, result, name ? name : "unknown", p->name, address);
  }
  slot->address = address;
  return 0;
}

/* ---- launch ---- */
static int tb_launch(int device, int kernel, const int64_t grid[3], const int64_t block[3], const int64_t* cluster, int dependent, CUstream stream, void** params) {
  if (grid[0] > 2147483647 || grid[1] > 65535 || grid[2] > 65535)
    return tb_fail("ValueError", "the launch needs a grid of %lld x %lld x %lld blocks; accepted: at most 2147483647 x 65535 x 65535. Split the call along m", (long long)grid[0], (long long)grid[1], (long long)grid[2]);
  CUfunction function = tb_devices[device].functions[kernel];
  if (!cluster && !dependent) {
    TB_CALL(cuLaunchKernel, device, function, (unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2], (unsigned)block[0], (unsigned)block[1], (unsigned)block[2], (unsigned)tb_kernel_smem[kernel], stream, params, NULL);
    return 0;
  }
  if (!tb_cuLaunchKernelEx) return tb_fail("RuntimeError", "the NVIDIA driver has no cuLaunchKernelEx; accepted: a driver for CUDA 11.8 or newer. Update it");
  CUlaunchAttribute attributes[2];
  memset(attributes, 0, sizeof attributes);
  CUlaunchConfig config = {{(uint32_t)grid[0], (uint32_t)grid[1], (uint32_t)grid[2]}, {(uint32_t)block[0], (uint32_t)block[1], (uint32_t)block[2]}, (uint32_t)tb_kernel_smem[kernel], stream, attributes, 0};
  if (cluster) {
    attributes[config.num_attributes].id = TB_ATTRIBUTE_CLUSTER;
    for (int i = 0; i < 3; ++i) attributes[config.num_attributes].value.dim[i] = (uint32_t)cluster[i];
    config.num_attributes++;
  }
  if (dependent) {
    attributes[config.num_attributes].id = TB_ATTRIBUTE_DEPENDENT;
    attributes[config.num_attributes].value.flag = 1;
    config.num_attributes++;
  }
  TB_CALL(cuLaunchKernelEx, device, &config, function, params, NULL);
  return 0;
}

/* The generated body: runs with the device's primary context current. */
static int tb_body(const DLTensor* const* t, int device, CUstream stream, int dependent);

static int tb_enter(const DLTensor* const* t, int device, CUstream stream, int dependent) {
  CUcontext current, popped;
  TB_CALL(cuCtxGetCurrent, device, &current);
  if (current == tb_devices[device].context) return tb_body(t, device, stream, dependent);
  TB_CALL(cuCtxPushCurrent_v2, device, tb_devices[device].context);
  int failed = tb_body(t, device, stream, dependent);
  tb_cuCtxPopCurrent_v2(&popped);
  return failed;
}

/* ---- a call: check the arguments, load the module if it is new to the device, launch ---- */
static const tb_param tb_params[TB_PARAMS];

/* dependent: kernels that wait for their predecessor themselves may start before it has ended. */
static int tb_run(const TVMFFIAny* args, int32_t num_args, int dependent) {
  if (num_args != TB_PARAMS) return tb_fail("TypeError", "got %d arguments; accepted: %d (%s)", num_args, TB_PARAMS, TB_PARAM_NAMES);
  const DLTensor* t[TB_PARAMS];
  DLTensor named; /* at most one parameter may be an address */
  if (tb_check(&tb_params[0], &args[0], -1, &t[0]) != 0) return -1;
  const int device = t[0]->device.device_id;
  for (int i = 1; i < TB_PARAMS; ++i) {
    if (tb_params[i].address && args[i].type_index == kTVMFFIInt) {
      if (tb_check_address(&tb_params[i], args[i].v_int64, device, &named) != 0) return -1;
      t[i] = &named;
    } else if (tb_check(&tb_params[i], &args[i], device, &t[i]) != 0) {
      return -1;
    }
  }
  if (tb_prepare(device) != 0) return -1;
  return tb_enter(t, device, TVMFFIEnvGetStream(kDLCUDA, device), dependent);
}

#endif /* TILEBIT_HOST_RUNTIME_H_ */
