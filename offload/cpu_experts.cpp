// Products of packed experts on a CPU, for few tokens; cpu_experts.py builds and calls this.
//
// One call computes a layer's chosen experts in five phases, with a barrier after each:
//
//   1. x becomes integers in the order of the codes
//   2. gate and up, activation                        rows of all chosen experts, shared out
//   3. h becomes integers
//   4. down, times the pair's weight                  rows of all chosen experts, shared out
//   5. sums over a token's experts                    rows of y, shared out

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

constexpr auto SPIN = std::chrono::milliseconds(1);  // after a call, before a thread sleeps

struct alignas(LINE) Flag {  // alone in its line, or those who wait for one slow down the others
  std::atomic<uint32_t> value{0};
};

struct alignas(LINE) Pool {
  const int count;  // threads, the caller's one included
  Flag started, passed, asleep;
  Flag next_up, next_down;    // rows that no thread has taken
  std::vector<Flag> arrived;  // at a barrier, by thread
  std::vector<std::thread> workers;
  std::mutex turn;  // of callers
  std::atomic<bool> stopping{false};
  Call *call = nullptr;
  // What a call needs; kept for the next one
  Inputs x, h;
  std::vector<int> experts, pairs, first;  // distinct experts, and the pairs of each
  std::vector<int> tokens;                 // of `pairs`
  std::vector<int> in_order;               // 0, 1, ...
  std::vector<float> outputs;              // [pairs, out]

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
      wait_for_all(thread);
    }
  }

  void wait_for_call(uint32_t seen) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    for (int n = 1; started.value.load(std::memory_order_acquire) == seen; n++) {
      _mm_pause();
      if (n % 256) continue;
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
      if (n % 256 == 0) sched_yield();  // there may be more threads than cores
    }
  }

  // A barrier: thread 0 waits for the others, then all go on.
  void wait_for_all(int thread) {
    const uint32_t next = arrived[thread].value.load(std::memory_order_relaxed) + 1;
    arrived[thread].value.store(next, std::memory_order_release);
    if (thread) return wait_for(passed, next);
    for (int k = 1; k < count; k++) wait_for(arrived[k], next);
    passed.value.store(next, std::memory_order_release);
  }

  void run(Call &given) {
    call = &given;
    next_up.value = next_down.value = 0;
    started.value++;
    if (asleep.value.load()) started.value.notify_all();
    work(given, 0);
    wait_for_all(0);
  }
};

static int64_t shares_of(int64_t n, int threads) { return n * SHARES / 100 / threads; }

// Call `visit(begin, end)` for a thread's rows of n: an equal share of the first ones, then pieces
// of the rest, which a thread takes when it is ready. So threads end together where cores differ.
template <class Visit>
static void share_out(int64_t n, int thread, int threads, Flag &next, Visit visit) {
  const int64_t shares = shares_of(n, threads);
  visit(shares * thread, shares * (thread + 1));
  const int64_t rest = n - shares * threads;
  for (;;) {
    const int64_t begin = next.value.fetch_add(PIECE, std::memory_order_relaxed);
    if (begin >= rest) return;
    visit(shares * threads + begin, shares * threads + std::min<int64_t>(begin + PIECE, rest));
  }
}

// One layer ---------------------------------------------------------------------------------------

struct Layer {
  Weight w13, w2;
  int32_t activation;
  float limit, alpha;
  int32_t n_experts;
  Pool *pool;
};

enum Dtype { X_F32, X_BF16, X_F16 };  // DTYPES in cpu_experts.py

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

static void read_x(Call &call, Pool &pool, int thread) {
  Inputs &x = pool.x;
  const int64_t whole = (int64_t)call.n_tokens * x.in;
  const uint8_t *from = (const uint8_t *)call.x;
  const int unit = x.codes == BF16 ? 1 : x.group;
  const Range range(whole / unit, thread, pool.count);
  for (int64_t n = range.begin; n < range.end; n++) {
    for (int64_t i = n * unit; i < (n + 1) * unit; i++)
      x.values[i] = call.dtype == X_BF16  ? bf16(from, i)
                    : call.dtype == X_F16 ? f16(from, i)
                                          : f32(from, i);
    if (x.codes != BF16) x.prepare(n / x.groups, n % x.groups);
  }
}

static void gate_up(Call &call, Pool &pool, int thread, float *scratch, float *out) {
  const Layer &layer = *call.layer;
  const int64_t width = layer.w2.in;
  const bool gated = layer.w13.out > width;
  auto visit = [&](int64_t begin, int64_t end) {
    for (int64_t n = begin, rows; n < end; n += rows) {
      const int64_t u = n / width, row = n % width;
      rows = std::min({(int64_t)ROWS, width - row, end - n});
      const int first = pool.first[u], count = pool.first[u + 1] - first, e = pool.experts[u];
      const int *tokens = pool.tokens.data() + first;
      float *up = gated ? out + count * ROWS : out;
      dot_rows(layer.w13, e, row, rows, pool.x, tokens, count, scratch, out);
      if (gated) dot_rows(layer.w13, e, row + width, rows, pool.x, tokens, count, scratch, up);
      for (int k = 0; k < count; k++)
        for (int r = 0; r < rows; r++)
          pool.h.values[(first + k) * width + row + r] = activate(
              layer.activation, layer.limit, layer.alpha, out[k * ROWS + r], up[k * ROWS + r]);
    }
  };
  share_out(width * pool.experts.size(), thread, pool.count, pool.next_up, visit);
}

static void down(Call &call, Pool &pool, int thread, float *scratch, float *out) {
  const Weight &w = call.layer->w2;
  auto visit = [&](int64_t begin, int64_t end) {
    for (int64_t n = begin, rows; n < end; n += rows) {
      const int64_t u = n / w.out, row = n % w.out;
      rows = std::min({(int64_t)ROWS, w.out - row, end - n});
      const int first = pool.first[u], count = pool.first[u + 1] - first;
      dot_rows(w, pool.experts[u], row, rows, pool.h, pool.in_order.data() + first, count, scratch,
               out);
      for (int k = 0; k < count; k++) {
        const float weight = call.weights[pool.pairs[first + k]];
        float *y = pool.outputs.data() + (int64_t)(first + k) * w.out + row;
        for (int r = 0; r < rows; r++) y[r] = weight * out[k * ROWS + r];
      }
    }
  };
  share_out(w.out * pool.experts.size(), thread, pool.count, pool.next_down, visit);
}

static void sum_outputs(Call &call, Pool &pool, int thread) {
  const int64_t out = call.layer->w2.out;
  const Range range(out, thread, pool.count);
  for (int t = 0; t < call.n_tokens; t++)
    std::fill(call.y + t * out + range.begin, call.y + t * out + range.end, 0.f);
  for (size_t n = 0; n < pool.pairs.size(); n++) {
    const float *from = pool.outputs.data() + n * out;
    float *y = call.y + pool.tokens[n] * out;
    for (int64_t row = range.begin; row < range.end; row++) y[row] += from[row];
  }
}

static void work(Call &call, int thread) {
  if (call.read) return read_bytes(call, thread, call.layer->pool->count);
  Pool &pool = *call.layer->pool;
  static thread_local std::vector<float> scratch, out;
  const int floats = std::max(pool.x.codes == BF16 ? 0 : pool.x.sets * pool.x.stride,
                              pool.h.codes == BF16 ? 0 : pool.h.sets * pool.h.stride);
  scratch.resize(MANY * floats);
  out.resize(2 * ROWS * pool.pairs.size());
  const Weight &w13 = call.layer->w13, &w2 = call.layer->w2;
  const int64_t width = w2.in, shares = shares_of(width * pool.experts.size(), pool.count);
  const int64_t begin = shares * thread, u = begin / width, row = begin % width;
  for (int64_t half = row; half < w13.out; half += width)  // memory would be idle until the barrier
    prefetch_rows(w13, pool.experts[u], half, std::min(shares, width - row), EARLY);
  read_x(call, pool, thread);
  pool.wait_for_all(thread);
  gate_up(call, pool, thread, scratch.data(), out.data());
  const int64_t down_shares = shares_of(w2.out * pool.experts.size(), pool.count);
  const int64_t down_u = down_shares * thread / w2.out, down_row = down_shares * thread % w2.out;
  prefetch_rows(w2, pool.experts[down_u], down_row, std::min(down_shares, w2.out - down_row), EARLY);
  pool.wait_for_all(thread);
  if (pool.h.codes != BF16) {
    const Range range((int64_t)pool.pairs.size() * pool.h.groups, thread, pool.count);
    for (int64_t n = range.begin; n < range.end; n++)
      pool.h.prepare(n / pool.h.groups, n % pool.h.groups);
    pool.wait_for_all(thread);
  }
  down(call, pool, thread, scratch.data(), out.data());
  pool.wait_for_all(thread);
  sum_outputs(call, pool, thread);
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
  pool.x.resize(call->layer->w13, call->n_tokens);
  pool.h.resize(w2, pool.pairs.size());
  pool.outputs.resize(pool.pairs.size() * w2.out);
  pool.run(*call);
}

// Answer requests until there has been none for some seconds. flags, in pinned memory, has the
// numbers of ops/step/cpu_share.py. calls: of each layer, by the number of tokens up to `most`.
void serve(int32_t *flags, Call **calls, int most, double seconds) {
  constexpr int ASKED = 0, LAYER = 1, TOKENS = 2, ANSWERED = 16;
  using Clock = std::chrono::steady_clock;
  auto last = Clock::now();
  for (int n = 1;; n++) {
    const int32_t asked = __atomic_load_n(flags + ASKED, __ATOMIC_ACQUIRE);
    if (asked != flags[ANSWERED]) {
      run_experts(calls[flags[LAYER] * most + flags[TOKENS] - 1]);
      __atomic_store_n(flags + ANSWERED, asked, __ATOMIC_RELEASE);
      last = Clock::now();
    } else if (n % 4096) {
      _mm_pause();
    } else {
      if (Clock::now() - last > std::chrono::duration<double>(seconds)) return;
      sched_yield();  // more threads than cores
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
