// The bodies of cuda_threads.h.

namespace tilebit_host {
Place place;
Fiber fibers[MAX_THREADS];
Warp warps[MAX_THREADS / WARP];
Meeting meetings[MAX_BLOCKS][MAX_BARRIERS], cluster_meeting;
std::vector<Copy> bulk_copies;
std::deque<float4> sent_values;
jmp_buf scheduler;
int current, block_threads, first_block, running_blocks;
bool in_fiber;
bool late_products;
const char* fault = nullptr;
bool unpublished[MAX_BLOCKS], unread[MAX_BLOCKS];
Fiber& me() { return fibers[current]; }
int rank() { return in_fiber ? me().block : first_block; }
static Body* body;
// A fiber's whole life: one body after another.
static void enter() {
  for (;;) {
    body->run(me().block, me().thread);
    me().ended = true;
    if (!_setjmp(me().at)) _longjmp(scheduler, 1);
  }
}
__attribute__((noinline)) void wait_for_change(const uint32_t* word, uint32_t seen) {
  me().word = word, me().seen = seen;
  if (!_setjmp(me().at)) _longjmp(scheduler, 1);
}
void let_others_go_first() {
  me().patient = true;
  wait_for_change(nullptr, 0);
}
void leave() {
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
void meet(Meeting& meeting, uint32_t threads) {
  if (++meeting.arrived == threads) {
    meeting.arrived = 0, ++meeting.generation;
    return;
  }
  wait_for_change(&meeting.generation, meeting.generation);
}
// The lanes of `mask` meet, each with what it brings; the last to come runs all(lanes) for them.
template <typename F>
static void collective(const char* operation, void* brings, F all, uint32_t mask = ~0u) {
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

void exchange(const char* operation, uint32_t mask, const void* brings, void* receives, int bytes, int source) {
  struct Lane {
    const void* brings;
    void* receives;
    int bytes, source;
  } mine = {brings, receives, bytes, source};
  if (!(mask >> source & 1)) fault = "a shuffle reads a lane outside of its mask";
  const auto all = [mask](void** lanes) {
    for (int lane = 0; lane < WARP; ++lane)
      if (mask >> lane & 1) {
        const Lane& own = *static_cast<const Lane*>(lanes[lane]);
        if (mask >> own.source & 1) memcpy(own.receives, static_cast<const Lane*>(lanes[own.source])->brings, own.bytes);
      }
  };
  collective(operation, &mine, all, mask);
}

uint32_t ballot(const char* operation, uint32_t mask, bool vote) {
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
bool in_a_tensor(const void* address, int bytes) {
  if (place.tensors[0][0] == nullptr) return true;
  const char* first = static_cast<const char*>(address);
  for (const auto& [begin, end] : place.tensors)
    if (begin <= first && first + bytes <= end) return true;
  fault = "a load or store is past the ends of the tensors";
  return false;
}
bool has_left(int block) {
  if (block == rank() || place.shared_bytes == 0) return block != rank() && place.shared[block] == nullptr;
  const Fiber* first = fibers + (block - first_block) * block_threads;
  return std::all_of(first, first + block_threads, [](const Fiber& f) { return f.ended; });
}
// Lets the threads from `first` on run whose turn it is, in an order that is not theirs, each as far as it gets. Returns how many ended.
static int run_some(int first, int count, bool& moved) {
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
static bool wake(int count, bool last) {
  bool any = false;
  for (int t = count - 1; t >= 0 && !(last && any && t % WARP == WARP - 1); --t) {
    any |= fibers[t].patient && !fibers[t].ended;
    fibers[t].patient = false;
  }
  return any;
}
const char* run_fibers(Body& work, int blocks) {
  body = &work;
  memset(warps, 0, sizeof warps), memset(meetings, 0, sizeof meetings), memset(&cluster_meeting, 0, sizeof cluster_meeting);
  bulk_copies.clear(), sent_values.clear();
  running_blocks = blocks, fault = nullptr;
  if (place.shared_bytes) begin_kernel();
  // Copies outlast a function of a kernel, not the cluster that runs it.
  static const char* shared_before = nullptr;
  const bool goes_on = place.shared_bytes == 0 && place.shared[0] && place.shared[0] == shared_before;
  shared_before = place.shared[0];
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
    if (!goes_on) f.copies.clear();
    f.groups.clear(), f.issued.clear(), f.product_groups.clear();
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
Index index_of(const int32_t* v) { return {v[0], v[1], v[2]}; }
}  // namespace tilebit_host
void __syncthreads() { tilebit_host::meet(tilebit_host::meetings[tilebit_host::rank()][0], tilebit_host::block_threads); }
int __syncthreads_and(int vote) {
  static bool against[tilebit_host::MAX_BLOCKS];
  bool& one = against[tilebit_host::rank()];
  one = false;
  __syncthreads();
  one |= vote == 0;
  __syncthreads();
  const bool found = one;
  __syncthreads();  // all have read it
  return !found;
}
void __syncwarp(uint32_t mask) { tilebit_host::collective("syncwarp", nullptr, [](void**) {}, mask); }
void __threadfence() { tilebit_host::unpublished[tilebit_host::rank()] = tilebit_host::unread[tilebit_host::rank()] = false; }
uint32_t __ballot_sync(uint32_t mask, int vote) { return tilebit_host::ballot("ballot", mask, vote != 0); }
int __any_sync(uint32_t mask, int vote) { return tilebit_host::ballot("any", mask, vote != 0) != 0; }
int __all_sync(uint32_t mask, int vote) { return tilebit_host::ballot("all", mask, vote != 0) == mask; }
unsigned read_ticket(const unsigned* p) {
  tilebit_host::unread[tilebit_host::rank()] = true;
  return *p;
}
unsigned atomicInc(unsigned* p, unsigned limit) {
  if (!tilebit_host::in_a_tensor(p)) return 0;
  if (tilebit_host::unpublished[tilebit_host::rank()]) tilebit_host::fault = "a ticket is taken without a fence after the stores that it stands for";
  tilebit_host::unread[tilebit_host::rank()] = true;
  const unsigned old = *p;
  *p = old >= limit ? 0 : old + 1;
  return old;
}
