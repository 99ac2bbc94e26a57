// The threads of a block, or of a cluster of blocks, as fibers that run until they wait: barriers, identities, and memory operations.
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <algorithm>
#include <deque>
#include <type_traits>
#include <utility>
#include <vector>

using std::max;
using std::min;

namespace tilebit_host {

constexpr int MAX_THREADS = 1024, MAX_BLOCKS = 8, MAX_TENSORS = 16, MAX_BARRIERS = 16, STACK = 1 << 16, WARP = 32;
constexpr int64_t MAX_TURNS = 1 << 23;  // of fibers; a call that takes more never ends

// A barrier of a known number of threads; the last to come goes on at once.
struct Meeting {
  uint32_t arrived, generation;
};
struct Index {
  int x, y, z;
};
// Where a launch stands: its grid, and the blocks of the cluster that runs now; what copies may read. device_code.py has the same fields.
struct Place {
  int32_t grid[3], blocks;
  int32_t index[MAX_BLOCKS][3];
  char* shared[MAX_BLOCKS];
  const char* tensors[MAX_TENSORS][2];  // begin and end of each
  int32_t shared_bytes;  // of a block whose whole kernel runs; 0: single functions of it
};
struct Copy {
  char* to;
  const char* from;
  int bytes;
  int read;       // bytes of `from`; zeros follow
  void* barrier;  // a bulk copy's
};
// wgmma of a warp: rows(what each lane brings) computes its 16 rows of so many columns.
struct WarpProduct {
  void (*rows)(void**);
  int columns;
  bool across;  // b's columns lie together, else their elements of k
  int warp;  // of its four
  const uint32_t* registers;  // of a, or null: it lies in shared memory, as its descriptor says
  uint64_t a, b;
  float* d;
  bool keep;  // what d holds
};
struct Fiber {
  ucontext_t start;
  jmp_buf at;
  bool started, ended;
  bool left;     // in the middle of its body, by exit
  bool patient;  // runs again when nobody else can
  void* stack;  // kept for the next call
  const uint32_t* word;  // runs again when this is no longer `seen`
  uint32_t seen;
  int block, thread;
  std::vector<Copy> copies;    // cp.async that have not landed
  std::vector<size_t> groups;  // how many of them each committed group left outstanding in all
  std::vector<WarpProduct> issued;  // that are not computed yet
  std::vector<size_t> product_groups;  // likewise
};
// Lanes of a warp that meet; lanes that meet apart from others do so under the first of their mask.
struct Gathering {
  Meeting meeting;
  const char* operation;
  uint32_t mask;
};
struct Warp {
  Gathering gatherings[WARP];
  void* lanes[WARP];
};

extern Place place;
extern Fiber fibers[MAX_THREADS];
extern Warp warps[MAX_THREADS / WARP];
extern Meeting meetings[MAX_BLOCKS][MAX_BARRIERS], cluster_meeting;
extern std::vector<Copy> bulk_copies;   // in flight
extern std::deque<float4> sent_values;  // to another block, whether they have landed or not
extern jmp_buf scheduler;
extern int current, block_threads, first_block, running_blocks;
extern bool in_fiber;
extern bool late_products;  // else at once
extern const char* fault;  // what a thread did that no thread may do
// Since the block's last __threadfence: it has stored for other blocks; it has taken a ticket.
extern bool unpublished[MAX_BLOCKS], unread[MAX_BLOCKS];

Fiber& me();
int rank();

struct Body {
  virtual void run(int block, int thread) = 0;
};
// Comes back when the word has changed.
void wait_for_change(const uint32_t* word, uint32_t seen);
// Comes back when no other thread can go on.
void let_others_go_first();
// The thread's last instruction.
void leave();

// Where `threads` threads of the block, the cluster or a part of them meet.
void meet(Meeting& meeting, uint32_t threads);

// Every lane of `mask` brings `bytes` bytes and receives those of lane `source`.
void exchange(const char* operation, uint32_t mask, const void* brings, void* receives, int bytes, int source);
template <typename T>
T shuffle(const char* operation, uint32_t mask, T value, int source) {
  T received = value;
  exchange(operation, mask, &value, &received, sizeof(T), source);
  return received;
}

// Bit l of the result: what lane l of `mask` brings.
uint32_t ballot(const char* operation, uint32_t mask, bool vote);

// Whether all threads of another block of the cluster have ended; where they run apart from this call, its memory is gone then.
bool has_left(int block);

// Memory that a tensor has, where tensors are known (a launch): an address that is in none of them is a fault, and reads as nothing.
bool in_a_tensor(const void* address, int bytes);
template <typename T>
bool in_a_tensor(const T* p) { return in_a_tensor(p, sizeof(T)); }

// Runs all threads. In every second call warp after warp, the last one first, goes as far as it gets by itself; else they all keep step: a
// race between warps shows in one of the two. Returns what is wrong: threads that wait for ever.
const char* run_fibers(Body& work, int blocks);

template <typename T>
T argument(intptr_t value) {
  if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(value);
  else if constexpr (std::is_same_v<T, float>) {  // its bits
    float number;
    memcpy(&number, &value, 4);
    return number;
  }
  else return static_cast<T>(value);
}

template <typename R, typename... A>
struct Call : Body {
  R (*function)(A...);
  const intptr_t *base, *stride;
  template <size_t... I>
  R apply(int block, int thread, std::index_sequence<I...>) {
    const intptr_t* own = base + (block - first_block) * sizeof...(A);
    return function(argument<A>(own[I] + stride[I] * thread)...);
  }
  void run(int block, int thread) override { apply(block, thread, std::index_sequence_for<A...>{}); }
};

// Calls function(base[0] + stride[0] * thread, ...) on every thread of `blocks` blocks of the cluster, from `first` on, each with its row of
// `base`. Returns what went wrong, or null.
template <typename R, typename... A>
const char* call(R (*function)(A...), const Place* where, int first, int blocks, const intptr_t* base, const intptr_t* stride, int threads) {
  Call<R, A...> work;
  work.function = function, work.base = base, work.stride = stride;
  place = *where, first_block = first, block_threads = threads;
  return run_fibers(work, blocks);
}

template <typename R, typename... A>
int value(R (*function)(A...), const Place* where, const intptr_t* base) {
  Call<R, A...> work;
  const intptr_t stride[sizeof...(A)] = {};
  work.function = function, work.base = base, work.stride = stride;
  place = *where, first_block = 0;
  if constexpr (std::is_void_v<R>) return 0;
  else return int(work.apply(0, 0, std::index_sequence_for<A...>{}));
}

Index index_of(const int32_t* v);

}  // namespace tilebit_host

#define threadIdx (tilebit_host::Index{tilebit_host::me().thread, 0, 0})
#define blockIdx (tilebit_host::index_of(tilebit_host::place.index[tilebit_host::rank()]))
#define gridDim (tilebit_host::index_of(tilebit_host::place.grid))

// Every thread of the block waits for all others.
void __syncthreads();
int __syncthreads_and(int vote);  // whether all threads vote for it
void __syncwarp(uint32_t mask = ~0u);
// A ticket says that what was stored before is there, and that what others stored may be read: a fence before it, and one after it.
void __threadfence();

// ---- warps ----
// `width` lanes, a power of two, are a group of their own; a source outside of it is the lane itself.
template <typename T>
T __shfl_sync(uint32_t mask, T value, int lane, int width = tilebit_host::WARP) {
  const int own = tilebit_host::me().thread % tilebit_host::WARP;
  return tilebit_host::shuffle("shfl.idx", mask, value, (own & -width) | (lane & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int other, int width = tilebit_host::WARP) {
  const int own = tilebit_host::me().thread % tilebit_host::WARP, source = own ^ other;
  return tilebit_host::shuffle("shfl.bfly", mask, value, source >= (own & -width) + width ? own : source);
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T value, int distance, int width = tilebit_host::WARP) {
  const int own = tilebit_host::me().thread % tilebit_host::WARP;
  return tilebit_host::shuffle("shfl.down", mask, value, own % width + distance < width ? own + distance : own);
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, int distance, int width = tilebit_host::WARP) {
  const int own = tilebit_host::me().thread % tilebit_host::WARP;
  return tilebit_host::shuffle("shfl.up", mask, value, own % width >= distance ? own - distance : own);
}
uint32_t __ballot_sync(uint32_t mask, int vote);
int __any_sync(uint32_t mask, int vote);
int __all_sync(uint32_t mask, int vote);

// ---- global memory ----
template <typename T>
void __stcg(T* p, T v) {
  tilebit_host::unpublished[tilebit_host::rank()] = true;
  if (tilebit_host::in_a_tensor(p)) *p = v;
}
template <typename T>
T __ldcg(const T* p) {
  if (tilebit_host::unread[tilebit_host::rank()]) tilebit_host::fault = "what other blocks stored is read without a fence after their ticket";
  return tilebit_host::in_a_tensor(p) ? *p : T();
}
template <typename T>
T __ldg(const T* p) { return tilebit_host::in_a_tensor(p) ? *p : T(); }
// Without taking it.
unsigned read_ticket(const unsigned* p);
unsigned atomicInc(unsigned* p, unsigned limit);
