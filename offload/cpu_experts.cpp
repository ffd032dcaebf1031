// Products of packed experts on a CPU, for few tokens; cpu_experts.py builds and calls this.
//
// One call computes a layer's chosen experts in two phases, with a barrier between them:
//
//   1. gate and up, activation -> h                   rows of all chosen experts, shared out
//   2. down, times the pair's weight, added to y      rows of y, shared out
//
// Each thread turns x and h into integers for itself (`Inputs`).

#include <sched.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "cpu_products.h"

enum Activation { SILU, CLAMPED, GELU, RELU_SQUARED };  // ACTIVATIONS in cpu_experts.py

static float activate(int kind, float limit, float alpha, float gate, float up) {
  if (kind == SILU) return gate / (1 + std::exp(-gate)) * up;
  if (kind == GELU) {
    const float inner = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
    return .5f * gate * (1 + std::tanh(inner)) * up;
  }
  if (kind == RELU_SQUARED) return gate > 0 ? gate * gate : 0;  // of up alone
  gate = std::min(gate, limit);
  up = std::min(std::max(up, -limit), limit);
  return gate / (1 + std::exp(-alpha * gate)) * (up + 1);
}

// Threads -----------------------------------------------------------------------------------------

struct Call;
static void work(Call &call, int thread);

// After a call, before a thread sleeps: layers of large experts are a millisecond apart, and waking
// all threads takes 50 us and more.
constexpr auto SPIN = std::chrono::milliseconds(4);
// Pauses before a waiting thread lets others run: some 50 us, since that is a system call, which
// sandboxes make slow.
constexpr int YIELD = 1024;
constexpr int SHARES = 75;      // percent of the rows that are shared out in advance
constexpr int UP_PIECE = 8;     // rows that a thread takes at once of the others, in phase 1
constexpr int DOWN_PIECE = 16;  // in phase 2

struct alignas(LINE) Flag {  // alone in its line, or those who wait for one slow down the others
  std::atomic<uint32_t> value{0};
};

struct alignas(LINE) Pool {
  const int count;  // threads, the caller's one included
  Flag started, passed, asleep;
  Flag next_up, next_down;    // rows that no thread has taken
  std::vector<Flag> arrived;  // at a barrier, or at the end, by thread
  std::vector<std::thread> workers;
  std::mutex turn;  // of callers
  std::atomic<bool> stopping{false};
  Call *call = nullptr;
  // What a call needs; kept for the next one
  std::vector<int> experts, pairs, first;  // distinct experts, and the pairs of each
  std::vector<int> tokens;                 // of `pairs`
  std::vector<int> in_order;               // 0, 1, ...
  std::vector<float> h;                    // [pairs, width]

  explicit Pool(int n) : count(n), arrived(n) {
    for (int k = 1; k < n; k++) workers.emplace_back([this, k] { serve(k); });
  }
  ~Pool() {
    stopping = true;
    started.value++;
    started.value.notify_all();
    for (auto &worker : workers) worker.join();
  }

  void serve(int thread) {
    for (uint32_t seen = 0;; seen++) {
      wait_for_call(seen);
      if (stopping) return;
      work(*call, thread);
      arrive(thread);
    }
  }

  void wait_for_call(uint32_t seen) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    for (int n = 1; started.value.load(std::memory_order_acquire) == seen; n++) {
      _mm_pause();
      if (n % YIELD) continue;
      if (std::chrono::steady_clock::now() > end) {
        asleep.value++;
        started.value.wait(seen);
        asleep.value--;
      } else {
        sched_yield();
      }
    }
  }

  static void wait_for(const Flag &flag, uint32_t value) {
    for (int n = 1; flag.value.load(std::memory_order_acquire) != value; n++) {
      _mm_pause();
      if (n % YIELD == 0) sched_yield();  // there may be more threads than cores
    }
  }

  uint32_t arrive(int thread) {
    const uint32_t number = arrived[thread].value.load(std::memory_order_relaxed) + 1;
    arrived[thread].value.store(number, std::memory_order_release);
    return number;
  }

  // Wait until all threads have arrived.
  void gather(uint32_t number) {
    for (int k = 1; k < count; k++) wait_for(arrived[k], number);
  }

  // A barrier: thread 0 waits for the others, then all go on.
  void wait_for_all(int thread) {
    const uint32_t number = arrive(thread);
    if (thread) return wait_for(passed, number);
    gather(number);
    passed.value.store(number, std::memory_order_release);
  }

  void run(Call &given) {
    call = &given;
    next_up.value = next_down.value = 0;
    started.value++;
    if (asleep.value.load()) started.value.notify_all();
    work(given, 0);
    gather(arrive(0));
  }
};

// One layer ---------------------------------------------------------------------------------------

struct Layer {
  Weight w13, w2;
  int32_t activation;
  float limit, alpha;
  int32_t n_experts;
  Pool *pool;
};

struct Call {
  const Layer *layer;
  const void *x;  // [tokens, in]
  int32_t dtype, n_tokens;
  const int32_t *experts, *tokens;  // [pairs]
  const float *weights;             // [pairs]
  const int32_t *n_pairs;
  float *y;                      // [tokens, out]
  std::atomic<int64_t> *read;    // of a bandwidth test: bytes, and their sum
  const uint8_t *bytes;
  int64_t n_bytes;
};

struct Range {
  int64_t begin, end;
  Range(int64_t n, int thread, int threads)
      : begin(n * thread / threads), end(n * (thread + 1) / threads) {}
};

static void read_bytes(Call &call, int thread, int threads) {
  const Range range(call.n_bytes / SIZE, thread, threads);
  Bytes mixed[4] = {none(), none(), none(), none()};
  int64_t n = range.begin;
  for (; n + 4 <= range.end; n += 4)
    for (int k = 0; k < 4; k++) mixed[k] = flip(mixed[k], load(call.bytes + (n + k) * SIZE));
  int64_t words[SIZE / 8];
  const Bytes all = flip(flip(mixed[0], mixed[1]), flip(mixed[2], mixed[3]));
  std::memcpy(words, &all, SIZE);
  for (int64_t word : words) call.read->fetch_xor(word);
}

// A thread's rows of n, in chunks: an equal share of the first ones, then pieces of the rest, which
// a thread takes when it is ready. So threads end together where cores differ. A range of rows is
// visited several times, before the next one, by phase 2: once an expert.
struct Rows {
  const int64_t n, limit, shared;  // no chunk has rows on both sides of a multiple of `limit`
  const int visits, piece;
  Flag &next;
  int64_t begin, end, at;
  int visit = 0;

  Rows(int64_t n, int64_t limit, int visits, int piece, int thread, int threads, Flag &next)
      : n(n), limit(limit), shared(n * SHARES / 100 / threads / MANY * MANY * threads),
        visits(visits), piece(piece), next(next), begin(shared / threads * thread),
        end(begin + shared / threads), at(begin) {}

  // Begin the next chunk -> its number of rows; 0: there is none. `visit` is its visit.
  int take(int64_t &row) {
    while (at == end) {
      if (begin < end && ++visit < visits) {
        at = begin;
        continue;
      }
      visit = 0;
      begin = at = std::min(n, shared + (int64_t)next.value.fetch_add(piece));
      end = std::min(n, begin + piece);
      if (begin == end) return 0;
    }
    const int rows = std::min({(int64_t)ROWS, end - at, limit - at % limit});
    row = at, at += rows;
    return rows;
  }
};

// What a thread needs in each call
struct Local {
  Inputs x, h;
  std::vector<float> scratch, out;
};

static void gate_up(Call &call, Pool &pool, int thread, Local &own) {
  const Layer &layer = *call.layer;
  const int64_t width = layer.w2.in;
  const bool gated = layer.w13.out > width;
  Rows all(width * pool.experts.size(), width, 1, UP_PIECE, thread, pool.count, pool.next_up);
  auto take = [&] {
    int64_t row = 0;
    const int rows = all.take(row), u = row / width;
    return std::pair(u, Chunk{&layer.w13, pool.experts[u], row % width, rows});
  };
  auto [u, gate] = take();
  prefetch_all(gate);
  while (gate.rows) {
    const auto [next_u, next] = take();
    Chunk up = gate;
    up.row += width;
    const int first = pool.first[u], count = pool.first[u + 1] - first;
    const int *tokens = pool.tokens.data() + first;
    float *gates = own.out.data(), *ups = gated ? gates + count * ROWS : gates;
    dot_rows(gate, gated ? up : next, own.x, tokens, count, own.scratch.data(), gates);
    if (gated) dot_rows(up, next, own.x, tokens, count, own.scratch.data(), ups);
    for (int k = 0; k < count; k++)
      for (int r = 0; r < gate.rows; r++)
        pool.h[(first + k) * width + gate.row + r] = activate(
            layer.activation, layer.limit, layer.alpha, gates[k * ROWS + r], ups[k * ROWS + r]);
    u = next_u, gate = next;
  }
}

static void down(Call &call, Pool &pool, int thread, Local &own) {
  const Weight &w = call.layer->w2;
  const int experts = pool.experts.size();
  Rows all(w.out, w.out, experts, DOWN_PIECE, thread, pool.count, pool.next_down);
  auto take = [&] {
    int64_t row = 0;
    const int rows = all.take(row);
    return std::pair(all.visit, Chunk{&w, pool.experts[all.visit], row, rows});
  };
  auto [u, chunk] = take();
  prefetch_all(chunk);  // memory would be idle until the barrier
  pool.wait_for_all(thread);
  while (chunk.rows) {
    const auto [next_u, next] = take();
    const int first = pool.first[u], count = pool.first[u + 1] - first;
    dot_rows(chunk, next, own.h, pool.in_order.data() + first, count, own.scratch.data(),
             own.out.data());
    for (int t = 0; u == 0 && t < call.n_tokens; t++)
      std::fill_n(call.y + t * w.out + chunk.row, chunk.rows, 0.f);
    for (int k = 0; k < count; k++) {
      const float weight = call.weights[pool.pairs[first + k]];
      float *y = call.y + pool.tokens[first + k] * w.out + chunk.row;
      for (int r = 0; r < chunk.rows; r++) y[r] += weight * own.out[k * ROWS + r];
    }
    u = next_u, chunk = next;
  }
}

static void work(Call &call, int thread) {
  if (call.read) return read_bytes(call, thread, call.layer->pool->count);
  Pool &pool = *call.layer->pool;
  const Weight &w13 = call.layer->w13, &w2 = call.layer->w2;
  static thread_local Local own;
  own.x.begin(w13, call.x, call.dtype, call.n_tokens);
  own.h.begin(w2, pool.h.data(), X_F32, pool.pairs.size());
  own.scratch.resize(MANY * std::max(own.x.factors(), own.h.factors()));
  own.out.resize(2 * ROWS * pool.pairs.size());
  gate_up(call, pool, thread, own);
  down(call, pool, thread, own);
}

// Sort the pairs by expert, experts in the order of their first pair. Leave out those of experts
// that the layer does not have.
static void sort_pairs(const Call &call, Pool &pool) {
  pool.experts.clear(), pool.pairs.clear(), pool.tokens.clear(), pool.first.clear();
  const int n_pairs = *call.n_pairs;
  for (int n = 0; n < n_pairs; n++) {
    const int expert = call.experts[n];
    if (expert < 0 || expert >= call.layer->n_experts) continue;
    if (std::find(pool.experts.begin(), pool.experts.end(), expert) != pool.experts.end()) continue;
    pool.experts.push_back(expert);
    pool.first.push_back(pool.pairs.size());
    for (int m = n; m < n_pairs; m++)
      if (call.experts[m] == expert) {
        pool.pairs.push_back(m);
        pool.tokens.push_back(call.tokens[m]);
      }
  }
  pool.first.push_back(pool.pairs.size());
  while (pool.in_order.size() < pool.pairs.size()) pool.in_order.push_back(pool.in_order.size());
}

extern "C" {

Pool *new_pool(int threads) { return new Pool(threads); }
void delete_pool(Pool *pool) { delete pool; }
int vector_bytes() { return SIZE; }

void run_experts(Call *call) {
  Pool &pool = *call->layer->pool;
  const Weight &w2 = call->layer->w2;
  std::lock_guard<std::mutex> lock(pool.turn);
  sort_pairs(*call, pool);
  if (pool.pairs.empty()) {
    std::fill(call->y, call->y + (int64_t)call->n_tokens * w2.out, 0.f);
    return;
  }
  pool.h.resize(pool.pairs.size() * w2.in);
  pool.run(*call);
}

// For benchmarks: layer, begin and end in ns of each request, as long as there is room.
static int64_t *request_log = nullptr;
static int64_t logged = 0, log_size = 0;

void log_requests(int64_t *log, int64_t size) {
  log_size = logged = 0;
  request_log = log, log_size = size;
}
int64_t logged_requests() { return logged; }

// Answer requests until the flag STOP. flags, in pinned memory, has the numbers of
// ops/step/cpu_share.py. calls: of each layer, by the number of tokens up to `most`. After some
// seconds without a request, sleep between two looks, at most `longest` seconds.
//
// No Python runs: a thread that holds the GIL may wait for the GPU, which waits for an answer.
void serve(int32_t *flags, Call **calls, int most, double seconds, double longest) {
  constexpr int ASKED = 0, LAYER = 1, TOKENS = 2, ANSWERED = 16, BUSY = 17, STOP = 32;
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;
  auto last = Clock::now();
  Seconds pause(0);
  for (uint32_t n = 1;; n++) {
    const int32_t asked = __atomic_load_n(flags + ASKED, __ATOMIC_ACQUIRE);
    if (asked != flags[ANSWERED]) {
      const auto start = Clock::now();
      const int32_t layer = flags[LAYER];
      run_experts(calls[layer * most + flags[TOKENS] - 1]);
      __atomic_store_n(flags + ANSWERED, asked, __ATOMIC_RELEASE);
      last = Clock::now(), pause = Seconds(0);
      flags[BUSY] += std::chrono::duration_cast<std::chrono::microseconds>(last - start).count();
      if (logged < log_size) {
        int64_t *entry = request_log + 3 * logged++;
        entry[0] = layer;
        entry[1] = start.time_since_epoch().count(), entry[2] = last.time_since_epoch().count();
      }
    } else if (n % 4096) {
      _mm_pause();
    } else if (__atomic_load_n(flags + STOP, __ATOMIC_ACQUIRE)) {
      return;
    } else if (Clock::now() - last < Seconds(seconds)) {
      sched_yield();  // more threads than cores
    } else {
      pause = std::min(Seconds(longest), 2 * pause + Seconds(1e-5));
      std::this_thread::sleep_for(pause);
      n = -1;  // look once, then sleep again
    }
  }
}

// Seconds in which the pool reads these bytes `times` times.
double read_seconds(Pool *pool, const uint8_t *bytes, int64_t n_bytes, int times) {
  std::lock_guard<std::mutex> lock(pool->turn);
  std::atomic<int64_t> mixed{0};
  Layer layer{};
  layer.pool = pool;
  Call call{};
  call.layer = &layer, call.read = &mixed, call.bytes = bytes, call.n_bytes = n_bytes;
  const auto start = std::chrono::steady_clock::now();
  for (int n = 0; n < times; n++) pool->run(call);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void activate_all(int kind, float limit, float alpha, const float *gate, const float *up, float *h,
                  int n) {
  for (int i = 0; i < n; i++) h[i] = activate(kind, limit, alpha, gate[i], up[i]);
}
}
