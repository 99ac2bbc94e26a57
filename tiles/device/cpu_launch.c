/* Entry of a CPU kernel: checks the tensors, shares the iterations of its parallel loops out among threads, needs no TVM runtime.
 *
 * Compiled together with the loops' object file; KERNEL_DECLARATIONS names the header that tiles/cpu/outline.py wrote for it.
 *
 * Threads are those of the OpenMP library that the process already has (torch's): its workers spin for a while after a parallel
 * region, so that waking them costs about a microsecond, and torch.set_num_threads holds here too. It is looked up at load
 * and called by its ABI (GOMP_parallel, which LLVM's and Intel's libraries offer too): nothing is linked. Without one, one thread computes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <tvm/ffi/c_api.h>

typedef struct {
  const char* name;
  int code, bits, ndim;
  int64_t shape[4]; /* -1 - i: symbolic size i */
  int apart;        /* -1 - i: rows lie symbolic size i apart, a multiple of 16 bytes; 0: one after another */
} Expected;

#include KERNEL_DECLARATIONS

#define ALIGNMENT 64
#define FIRST_ADDRESS 65536 /* below it no process has memory (vm.mmap_min_addr): a view of a freed storage is its offset from null */

static void (*omp_parallel)(void (*)(void*), void*, unsigned, unsigned);
static int (*omp_max_threads)(void);

__attribute__((constructor)) static void find_openmp(void) {
  const char* const names[] = {"libgomp.so.1", "libiomp5.so", "libomp.so"};
  for (int i = -1; i < 3; ++i) {
    void* library = i < 0 ? RTLD_DEFAULT : dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD);
    if (i >= 0 && library == NULL) continue;
    *(void**)&omp_parallel = dlsym(library, "GOMP_parallel");
    *(void**)&omp_max_threads = dlsym(library, "omp_get_max_threads");
    if (omp_parallel != NULL && omp_max_threads != NULL) return;
  }
  omp_parallel = NULL;
}

static int available_threads(void) {
  if (omp_parallel == NULL || THREADS < 2) return 1;
  int threads = omp_max_threads();
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) < threads) threads = CPU_COUNT(&set);
  return threads < THREADS ? threads : THREADS;
}

typedef struct {
  atomic_int next;
  int32_t total, chunk;
  int loop;
  int32_t symbols[NUM_SYMBOLS];
  void* pointers[NUM_TENSORS + NUM_WORKSPACES];
} Work;

/* Take chunks until none is left. An iteration's result depends on nothing but itself, so it does not matter who computes it. */
static void take_chunks(void* arg) {
  Work* work = arg;
  for (int32_t begin; (begin = atomic_fetch_add_explicit(&work->next, work->chunk, memory_order_relaxed)) < work->total;) {
    const int32_t end = work->total - begin < work->chunk ? work->total : begin + work->chunk;
    run_loop(work->loop, begin, end, work->symbols, work->pointers);
  }
}

static void run_parallel(Work* work, int64_t total, int64_t together, int threads) {
  int64_t chunk = total / ((int64_t)threads * 16); /* several turns for each thread, so that a disturbed one does less */
  if (chunk > together) chunk = together;
  if (chunk < 1) chunk = 1;
  if (threads > (total + chunk - 1) / chunk) threads = (int)((total + chunk - 1) / chunk);
  work->total = (int32_t)total;
  work->chunk = (int32_t)chunk;
  atomic_store_explicit(&work->next, 0, memory_order_relaxed);
  if (threads > 1) {
    omp_parallel(take_chunks, work, (unsigned)threads, 0);
  } else {
    take_chunks(work);
  }
}

static int fail(const char* kind, const char* message) {
  TVMFFIErrorSetRaisedFromCStr(kind, message);
  return -1;
}

/* Put the data of the tensor in `arg` into `data` if it is what is expected (`symbols` below 0 are taken from here), else raise an error. */
static int checked_data(const TVMFFIAny* arg, const Expected* expected, int64_t* symbols, void** data) {
  const DLTensor* t = NULL;
  if (arg->type_index == kTVMFFIDLTensorPtr) t = arg->v_ptr;
  if (arg->type_index == kTVMFFITensor) t = (const DLTensor*)((const char*)arg->v_obj + sizeof(TVMFFIObject));
  char message[256];
  if (t == NULL) {
    snprintf(message, sizeof message, "%s is not a tensor; accepted: a CPU tensor", expected->name);
    return fail("TypeError", message);
  }
  if (t->device.device_type != kDLCPU || t->dtype.code != expected->code || t->dtype.bits != expected->bits || t->dtype.lanes != 1 || t->ndim != expected->ndim) {
    snprintf(message, sizeof message, "%s has device type %d, dtype code %d of %d bits, %d dimensions; accepted: device type %d (CPU), dtype code %d of %d bits, %d dimensions",
             expected->name, (int)t->device.device_type, t->dtype.code, t->dtype.bits, t->ndim, (int)kDLCPU, expected->code, expected->bits, expected->ndim);
    return fail("ValueError", message);
  }
  int64_t stride = 1;
  for (int i = t->ndim - 1; i >= 0; --i) {
    int64_t size = expected->shape[i];
    if (size < 0) {
      int64_t* symbol = &symbols[-1 - size];
      size = *symbol < 0 ? (*symbol = t->shape[i]) : *symbol;
    }
    if (t->shape[i] != size) {
      snprintf(message, sizeof message, "%s has size %lld in dimension %d; accepted: %lld", expected->name, (long long)t->shape[i], i, (long long)size);
      return fail("ValueError", message);
    }
    if (i == 0 && expected->apart < 0) {
      const int64_t apart = t->strides != NULL && size > 1 ? t->strides[0] : stride;
      if (apart * expected->bits % 128 != 0) {
        snprintf(message, sizeof message, "%s has rows %lld elements apart; accepted: a multiple of %d (16 bytes). Pass %s.contiguous()", expected->name,
                 (long long)apart, 128 / expected->bits, expected->name);
        return fail("ValueError", message);
      }
      symbols[-1 - expected->apart] = apart;
    } else if (t->strides != NULL && size != 1 && t->strides[i] != stride) {
      snprintf(message, sizeof message, "%s is not contiguous; pass %s.contiguous()", expected->name, expected->name);
      return fail("ValueError", message);
    }
    stride *= size;
  }
  *data = (char*)t->data + t->byte_offset;
  if ((uintptr_t)*data < FIRST_ADDRESS && stride != 0) {
    snprintf(message, sizeof message, "%s has no memory: its storage was freed; accepted: a tensor whose storage holds it. Fill the storage again, or pass another tensor", expected->name);
    return fail("ValueError", message);
  }
  return 0;
}

__attribute__((visibility("default"))) int __tvm_ffi_run(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  (void)self;
  result->type_index = kTVMFFINone;
  result->zero_padding = 0;
  result->v_int64 = 0;
  if (num_args != NUM_TENSORS) {
    char message[128];
    snprintf(message, sizeof message, "got %d tensors; accepted: %d, the last is %s", (int)num_args, NUM_TENSORS, TENSORS[NUM_TENSORS - 1].name);
    return fail("TypeError", message);
  }
  Work work;
  int64_t symbols[NUM_SYMBOLS];
  for (int i = 0; i < NUM_SYMBOLS; ++i) symbols[i] = -1;
  for (int i = 0; i < NUM_TENSORS; ++i) {
    if (checked_data(&args[i], &TENSORS[i], symbols, &work.pointers[i]) != 0) return -1;
  }
  for (int i = 0; i < NUM_SYMBOLS; ++i) {
    if (symbols[i] > INT32_MAX / 2) {
      char message[128];
      snprintf(message, sizeof message, "%s is %lld; accepted: at most %d; split the call", SYMBOLS[i], (long long)symbols[i], INT32_MAX / 2);
      return fail("ValueError", message);
    }
    work.symbols[i] = (int32_t)symbols[i];
  }

  int64_t values[NUM_WORKSPACES + 2 * NUM_LOOPS], bytes = 0;
  sizes_of(work.symbols, values);
  for (int i = 0; i < NUM_WORKSPACES; ++i) {
    /* Loops index a workspace of 4-byte elements by 32 bits. */
    if (values[i] / 4 > INT32_MAX) return fail("ValueError", "a workspace or a loop is too large for one call; split the call");
    bytes += (values[i] + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  }
  char* scratch = bytes > 0 ? aligned_alloc(ALIGNMENT, (size_t)bytes) : NULL;
  if (bytes > 0 && scratch == NULL) return fail("MemoryError", "no memory for the call's workspace; split the call");
  char* free_space = scratch;
  for (int i = 0; i < NUM_WORKSPACES; ++i) {
    work.pointers[NUM_TENSORS + i] = free_space;
    free_space += (values[i] + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  }
  const int threads = available_threads();
  const char* too_large = NULL;
  for (work.loop = 0; work.loop < NUM_LOOPS; ++work.loop) {
    const int64_t extent = values[NUM_WORKSPACES + 2 * work.loop], together = values[NUM_WORKSPACES + 2 * work.loop + 1];
    if (extent > INT32_MAX / 2) {
      too_large = "a workspace or a loop is too large for one call; split the call";
      break;
    }
    run_parallel(&work, extent, together, threads);
  }
  free(scratch);
  return too_large == NULL ? 0 : fail("ValueError", too_large);
}
