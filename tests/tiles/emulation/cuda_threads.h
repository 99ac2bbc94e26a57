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
  bool valid;     // false: zeros are written
  void* barrier;  // a bulk copy's
};
// wgmma of a warp: rows(what each lane brings) computes its 16 rows.
struct WarpProduct {
  void (*rows)(void**);
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

static Place place;
static Fiber fibers[MAX_THREADS];
static Warp warps[MAX_THREADS / WARP];
static Meeting meetings[MAX_BLOCKS][MAX_BARRIERS], cluster_meeting;
static std::vector<Copy> bulk_copies;   // in flight
static std::deque<float4> sent_values;  // to another block, whether they have landed or not
static jmp_buf scheduler;
static int current, block_threads, first_block, running_blocks;
static bool in_fiber;
static bool late_products;  // else at once
static const char* fault = nullptr;  // what a thread did that no thread may do
// Since the block's last __threadfence: it has stored for other blocks; it has taken a ticket.
static bool unpublished[MAX_BLOCKS], unread[MAX_BLOCKS];
static void begin_kernel();
static bool land_oldest();

inline Fiber& me() { return fibers[current]; }
inline int rank() { return in_fiber ? me().block : first_block; }

struct Body {
  virtual void run(int block, int thread) = 0;
};
static Body* body;
// A fiber's whole life: one body after another.
static void enter() {
  for (;;) {
    body->run(me().block, me().thread);
    me().ended = true;
    if (!_setjmp(me().at)) _longjmp(scheduler, 1);
  }
}
// Comes back when the word has changed.
__attribute__((noinline)) static void wait_for_change(const uint32_t* word, uint32_t seen) {
  me().word = word, me().seen = seen;
  if (!_setjmp(me().at)) _longjmp(scheduler, 1);
}
// Comes back when no other thread can go on.
inline void let_others_go_first() {
  me().patient = true;
  wait_for_change(nullptr, 0);
}
// The thread's last instruction.
inline void leave() {
  me().ended = me().left = true;
  _longjmp(scheduler, 1);
}
__attribute__((noinline)) static void resume(int fiber) {
  current = fiber;
  if (_setjmp(scheduler)) return;
  if (me().started) _longjmp(me().at, 1);
  me().started = true;
  setcontext(&me().start);
}

// Where `threads` threads of the block, the cluster or a part of them meet.
inline void meet(Meeting& meeting, uint32_t threads) {
  if (++meeting.arrived == threads) {
    meeting.arrived = 0, ++meeting.generation;
    return;
  }
  wait_for_change(&meeting.generation, meeting.generation);
}

// The lanes of `mask` meet, each with what it brings; the last to come runs all(lanes) for them.
template <typename F>
void collective(const char* operation, void* brings, F all, uint32_t mask = ~0u) {
  Warp& warp = warps[current / WARP];
  if (!(mask >> current % WARP & 1)) fault = "a lane is not in the mask that it names";
  Gathering& gathering = warp.gatherings[mask ? __builtin_ctz(mask) : 0];
  if (gathering.meeting.arrived == 0) gathering.operation = operation, gathering.mask = mask;
  if (strcmp(gathering.operation, operation) || gathering.mask != mask) fault = "the lanes of a warp are at different instructions";
  warp.lanes[current % WARP] = brings;
  const uint32_t count = __builtin_popcount(mask);
  if (gathering.meeting.arrived + 1 == count) all(warp.lanes);
  meet(gathering.meeting, count);
}

// Every lane of `mask` brings a value and receives that of lane `source`.
template <typename T>
T shuffle(const char* operation, uint32_t mask, T value, int source) {
  struct Lane {
    T brings, receives;
    int source;
  } mine = {value, value, source};
  if (!(mask >> source & 1)) fault = "a shuffle reads a lane outside of its mask";
  const auto all = [mask](void** lanes) {
    for (int lane = 0; lane < WARP; ++lane)
      if (mask >> lane & 1) {
        Lane& own = *static_cast<Lane*>(lanes[lane]);
        if (mask >> own.source & 1) own.receives = static_cast<Lane*>(lanes[own.source])->brings;
      }
  };
  collective(operation, &mine, all, mask);
  return mine.receives;
}

// Bit l of the result: what lane l of `mask` brings.
inline uint32_t ballot(const char* operation, uint32_t mask, bool vote) {
  uint32_t mine = vote;
  const auto all = [mask](void** lanes) {
    uint32_t votes = 0;
    for (int lane = 0; lane < WARP; ++lane)
      if (mask >> lane & 1) votes |= *static_cast<uint32_t*>(lanes[lane]) << lane;
    for (int lane = 0; lane < WARP; ++lane)
      if (mask >> lane & 1) *static_cast<uint32_t*>(lanes[lane]) = votes;
  };
  collective(operation, &mine, all, mask);
  return mine;
}

// Whether all threads of another block of the cluster have ended; where they run apart from this call, its memory is gone then.
inline bool has_left(int block) {
  if (block == rank() || place.shared_bytes == 0) return block != rank() && place.shared[block] == nullptr;
  const Fiber* first = fibers + (block - first_block) * block_threads;
  return std::all_of(first, first + block_threads, [](const Fiber& f) { return f.ended; });
}

// Memory that a tensor has, where tensors are known (a launch): an address that is in none of them is a fault, and reads as nothing.
template <typename T>
bool in_a_tensor(const T* p) {
  if (place.tensors[0][0] == nullptr) return true;
  const char* address = reinterpret_cast<const char*>(p);
  for (const auto& [begin, end] : place.tensors)
    if (begin <= address && address + sizeof(T) <= end) return true;
  fault = "a load or store is past the ends of the tensors";
  return false;
}

// Lets the threads from `first` on run whose turn it is, in an order that is not theirs, each as far as it gets. Returns how many ended.
inline int run_some(int first, int count, bool& moved) {
  int ended = 0;
  for (int i = 0; i < count && !fault; ++i) {
    const int t = first + int((int64_t(i) * 97 + 31) % count);  // 97 divides no count of threads: a permutation
    Fiber& f = fibers[t];
    if (f.ended || f.patient || (f.word && *f.word == f.seen)) continue;
    f.word = nullptr, moved = in_fiber = true;
    resume(t);
    in_fiber = false;
    ended += fibers[t].ended;
  }
  return ended;
}

// Wakes those that let others go first; `last`: of the last warp that has some, so that the others stay behind. Whether there are any.
inline bool wake(int count, bool last) {
  bool any = false;
  for (int t = count - 1; t >= 0 && !(last && any && t % WARP == WARP - 1); --t) {
    any |= fibers[t].patient && !fibers[t].ended;
    fibers[t].patient = false;
  }
  return any;
}

// Runs all threads. In every second call warp after warp, the last one first, goes as far as it gets by itself; else they all keep step: a
// race between warps shows in one of the two. Returns what is wrong: threads that wait for ever.
inline const char* run_fibers(Body& work, int blocks) {
  body = &work;
  memset(warps, 0, sizeof warps), memset(meetings, 0, sizeof meetings), memset(&cluster_meeting, 0, sizeof cluster_meeting);
  bulk_copies.clear(), sent_values.clear();
  running_blocks = blocks, fault = nullptr;
  if (place.shared_bytes) begin_kernel();
  const int count = blocks * block_threads;
  if (count > MAX_THREADS) return "more threads than the emulation has room for";
  for (int t = 0; t < count; ++t) {
    Fiber& f = fibers[t];
    if (!f.ended || f.left) {  // new, or left in the middle of a body
      getcontext(&f.start);
      if (!f.stack) f.stack = aligned_alloc(64, STACK);
      f.start.uc_stack.ss_sp = f.stack, f.start.uc_stack.ss_size = STACK, f.start.uc_link = nullptr;
      makecontext(&f.start, enter, 0);
      f.started = false;
    }
    f.ended = f.left = f.patient = false, f.word = nullptr, f.block = first_block + t / block_threads, f.thread = t % block_threads;
    f.copies.clear(), f.groups.clear(), f.issued.clear(), f.product_groups.clear();
  }
  static bool apart = true;
  apart = !apart;
  if (apart) late_products = !late_products;  // all four combinations, one after another
  int64_t turns = 0;
  for (int left = count; left > 0;) {
    bool moved = false;
    if ((turns += left) > MAX_TURNS) return "a block never ends";
    if (apart) {
      for (int warp = (count - 1) / WARP; warp >= 0; --warp)
        for (bool again = true; again && !fault;) {
          again = false;
          left -= run_some(warp * WARP, min(WARP, count - warp * WARP), again);
          moved |= again;
          if (again && (turns += WARP) > MAX_TURNS) return "a block never ends";
        }
    } else {
      left -= run_some(0, count, moved);
    }
    if (fault) return fault;
    if (!moved && !land_oldest() && !wake(count, apart)) return "some threads ended, or wait elsewhere, where others wait at a barrier";
  }
  return bulk_copies.empty() ? nullptr : "a block ends while copies to it are in flight";
}

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

inline Index index_of(const int32_t* v) { return {v[0], v[1], v[2]}; }

}  // namespace tilebit_host

#define threadIdx (tilebit_host::Index{tilebit_host::me().thread, 0, 0})
#define blockIdx (tilebit_host::index_of(tilebit_host::place.index[tilebit_host::rank()]))
#define gridDim (tilebit_host::index_of(tilebit_host::place.grid))

// Every thread of the block waits for all others.
inline void __syncthreads() { tilebit_host::meet(tilebit_host::meetings[tilebit_host::rank()][0], tilebit_host::block_threads); }
inline void __syncwarp(uint32_t mask = ~0u) { tilebit_host::collective("syncwarp", nullptr, [](void**) {}, mask); }
// A ticket says that what was stored before is there, and that what others stored may be read: a fence before it, and one after it.
inline void __threadfence() { tilebit_host::unpublished[tilebit_host::rank()] = tilebit_host::unread[tilebit_host::rank()] = false; }

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
inline uint32_t __ballot_sync(uint32_t mask, int vote) { return tilebit_host::ballot("ballot", mask, vote != 0); }
inline int __any_sync(uint32_t mask, int vote) { return tilebit_host::ballot("any", mask, vote != 0) != 0; }
inline int __all_sync(uint32_t mask, int vote) { return tilebit_host::ballot("all", mask, vote != 0) == mask; }

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
inline unsigned read_ticket(const unsigned* p) {
  tilebit_host::unread[tilebit_host::rank()] = true;
  return *p;
}
inline unsigned atomicInc(unsigned* p, unsigned limit) {
  if (!tilebit_host::in_a_tensor(p)) return 0;
  if (tilebit_host::unpublished[tilebit_host::rank()]) tilebit_host::fault = "a ticket is taken without a fence after the stores that it stands for";
  tilebit_host::unread[tilebit_host::rank()] = true;
  const unsigned old = *p;
  *p = old >= limit ? 0 : old + 1;
  return old;
}
