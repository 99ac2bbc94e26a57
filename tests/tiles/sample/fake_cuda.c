/* A libcuda.so.1 for machines without a GPU: records what a host stub asks of the driver, one JSON object per line of $FAKE_CUDA_LOG.
 * $FAKE_CUDA_PARAMS spells the kernel's parameters: p pointer, m tensor map, i int32. $FAKE_CUDA_FAIL names a call that returns 700. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread void* stack[16] = {(void*)0x111};
static __thread int depth = 0;
static long encoded = 0;

static void record(const char* format, ...) {
  FILE* file = fopen(getenv("FAKE_CUDA_LOG"), "a");
  va_list list;
  va_start(list, format);
  vfprintf(file, format, list);
  va_end(list);
  fclose(file);
}

static int outcome(const char* name) {
  const char* fail = getenv("FAKE_CUDA_FAIL");
  return fail && !strcmp(fail, name) ? (strcmp(name, "cuModuleLoadData") ? 700 : 209) : 0;
}

int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDeviceGet(int* device, int id) { *device = id; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { (void)device; *value = attribute == 75 ? 7 : 5; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(uintptr_t)(0x1000 + device); record("{\"call\": \"retain\", \"device\": %d}\n", device); return 0; }
int cuCtxGetCurrent(void** context) { *context = stack[depth]; return 0; }
int cuCtxPushCurrent_v2(void* context) { stack[++depth] = context; return 0; }
int cuCtxPopCurrent_v2(void** context) { *context = stack[depth--]; return 0; }
int cuModuleLoadData(void** module, const void* image) {
  record("{\"call\": \"load\", \"context\": %ld, \"elf\": %d}\n", (long)(uintptr_t)stack[depth], !memcmp(image, "\177ELF", 4));
  *module = (void*)0x2000;
  return outcome("cuModuleLoadData");
}
int cuModuleGetFunction(void** function, void* module, const char* name) { (void)module; *function = strdup(name); return 0; }
int cuFuncSetAttribute(void* function, int attribute, int value) {
  record("{\"call\": \"attribute\", \"kernel\": \"%s\", \"attribute\": %d, \"value\": %d}\n", (char*)function, attribute, value);
  return 0;
}
int cuGetErrorName(int result, const char** name) { (void)result; *name = "FAKE_ERROR"; return 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { record("{\"call\": \"capture_mode\", \"mode\": %d}\n", *mode); *mode = 0; return 0; }

static void list(const char* name, const void* values, int count, int wide) {
  record("\"%s\": [", name);
  for (int i = 0; i < count; ++i)
    record("%s%llu", i ? ", " : "", wide ? (unsigned long long)((const uint64_t*)values)[i] : (unsigned long long)((const uint32_t*)values)[i]);
  record("], ");
}

int cuTensorMapEncodeTiled(void* map, int dtype, uint32_t rank, void* address, const uint64_t* dims, const uint64_t* strides, const uint32_t* box,
                           const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
  if ((uintptr_t)map % 64) return 1;
  record("{\"call\": \"encode\", \"dtype\": %d, \"address\": %llu, ", dtype, (unsigned long long)(uintptr_t)address);
  list("dims", dims, (int)rank, 1);
  list("strides", strides, (int)rank - 1, 1);
  list("box", box, (int)rank, 0);
  list("steps", steps, (int)rank, 0);
  record("\"options\": [%d, %d, %d, %d], \"id\": %ld}\n", interleave, swizzle, promotion, fill, ++encoded);
  memset(map, 0, 128);
  memcpy(map, &encoded, sizeof encoded);
  return outcome("cuTensorMapEncodeTiled");
}

static void launched(void* function, const uint32_t* grid, const uint32_t* block, unsigned smem, void* stream, void** params) {
  record("{\"call\": \"launch\", \"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"smem\": %u, \"stream\": %llu, \"context\": %ld, ", (char*)function,
         grid[0], grid[1], grid[2], block[0], block[1], block[2], smem, (unsigned long long)(uintptr_t)stream, (long)(uintptr_t)stack[depth]);
  record("\"params\": [");
  const char* kinds = getenv("FAKE_CUDA_PARAMS");
  for (int i = 0; kinds && kinds[i]; ++i)
    record("%s%llu", i ? ", " : "", kinds[i] == 'i' ? (unsigned long long)*(uint32_t*)params[i] : (unsigned long long)*(uint64_t*)params[i]);
  record("]");
}

int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem, void* stream, void** params, void** extra) {
  (void)extra;
  const uint32_t grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  launched(function, grid, block, smem, stream, params);
  record("}\n");
  return outcome("cuLaunchKernel");
}

typedef struct { uint32_t id, pad; union { uint32_t dim[3]; int flag; char bytes[64]; } value; } attribute;
typedef struct { uint32_t grid[3], block[3], smem; void* stream; attribute* attributes; uint32_t count; } config;

int cuLaunchKernelEx(const config* c, void* function, void** params, void** extra) {
  (void)extra;
  launched(function, c->grid, c->block, c->smem, c->stream, params);
  record(", \"attributes\": [");
  for (uint32_t i = 0; i < c->count; ++i)
    record("%s[%u, %u, %u, %u]", i ? ", " : "", c->attributes[i].id, c->attributes[i].value.dim[0], c->attributes[i].value.dim[1], c->attributes[i].value.dim[2]);
  record("]}\n");
  return 0;
}
