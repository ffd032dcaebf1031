// Rows of packed weights times a few vectors.
//
// Codes stay integers. The numbers x of a group become integers of 16 bits with a common unit, two
// digits of 8 bits each, since CPUs multiply unsigned bytes with signed ones. A weight is s * code - o,
// so a group's dot product is s * unit * sum(code * integer) - o * sum(x).

#pragma once

#include <cmath>
#include <vector>

#include "cpu_weights.h"

constexpr int MANY = 4;   // tokens that share one pass over a row
constexpr int ROWS = 16;  // rows of a chunk

// Rows that share one pass over x: their sums do not wait for each other.
constexpr int rows_of(int tokens) { return std::max(1, (WIDE_SUMS ? MANY : 2) / tokens); }

// Inputs ------------------------------------------------------------------------------------------

enum Dtype { X_F32, X_BF16, X_F16 };  // DTYPES in cpu_experts.py

// Vectors x [n, in] in the order of a weight's codes. Each thread has its own ones: it prepares a
// vector when it needs it, which takes less time than waiting for others.
struct Inputs {
  int codes = -1, in, group, words, groups, stride, sets, blocks, count;  // words: of a group
  int64_t digit_bytes;
  const uint8_t *source;
  int dtype;
  std::vector<float> values, units, sums;  // [n, in], [n, stride], [n, sets, stride]
  std::vector<int8_t> digits;              // [n, blocks, x planes, high and low, SIZE]
  std::vector<uint8_t> ready;              // [n]
  uint32_t group_of[LANES];                // of each word of a block that begins with a group

  // Begin a call. from: x in a dtype.
  void begin(const Weight &w, const void *from, int dtype, int n) {
    source = (const uint8_t *)from, this->dtype = dtype;
    ready.assign(n, 0);
    if (codes == w.codes && in == w.in && group == w.group && count == n) return;
    codes = w.codes, in = w.in, group = w.group, count = n;
    values.resize((int64_t)n * in + LANES);
    if (codes == BF16) return;
    const int fields = fields_of(codes);
    words = group / fields, groups = in / group, sets = sets_of(codes);
    stride = groups + LANES;
    blocks = (in / fields + LANES - 1) / LANES;
    digit_bytes = (int64_t)blocks * x_planes_of(codes) * 2 * SIZE;
    units.assign((int64_t)n * stride, 0.f);  // 0 after the last group, and after a row's end
    sums.assign((int64_t)n * sets * stride, 0.f);
    digits.assign(n * digit_bytes, 0);
    const int shift = __builtin_ctz(words);
    for (int lane = 0; lane < LANES; lane++) group_of[lane] = lane >> shift;
  }

  // Floats of `read_factors`, for a token
  int factors() const { return codes == BF16 ? 0 : sets * stride; }

  void need(int n) {
    if (ready[n]) return;
    ready[n] = 1;
    const int64_t first = (int64_t)n * in;
    float *to = values.data() + first;
    if (dtype == X_F32) std::memcpy(to, source + 4 * first, 4 * in);
    if (dtype == X_BF16)
      for (int i = 0; i < in; i++) to[i] = bf16(source, first + i);
    if (dtype == X_F16)
      for (int i = 0; i < in; i++) to[i] = f16(source, first + i);
    if (codes != BF16)
      for (int g = 0; g < groups; g++) prepare(n, g);
  }

  // Make group g of vector n integers.
  void prepare(int n, int g) {
    const float *x = values.data() + (int64_t)n * in + (int64_t)g * group;
    uint32_t largest_bits = 0;  // without the sign, larger numbers have larger bits, and NaN larger
    for (int i = 0; i < group; i++) {
      uint32_t bits;
      std::memcpy(&bits, x + i, 4);
      largest_bits = std::max(largest_bits, bits & 0x7FFFFFFF);
    }
    float largest;
    std::memcpy(&largest, &largest_bits, 4);
    if (largest_bits >= 0x7F800000) largest = NAN;  // of infinity too: it has no unit
    const float unit = largest < 1e-30f ? 1e-30f : largest / 32512.f, inverse = 1 / unit;
    units[(int64_t)n * stride + g] = unit;
    const int planes = fields_of(codes) / 4, byte_step = codes == Q6 ? 4 : planes * words;
    int32_t sum[2] = {0, 0};
    for (int m = 0; m < planes; m++) {
      const float *from = x + m * (codes == Q6 ? 16 : words);
      if (codes == E2M1_HALVES) {
        sum[0] += set_digits<0, 2>(n, g, m, from, byte_step, inverse);
        sum[1] += set_digits<2, 4>(n, g, m + 2, from, byte_step, inverse);
      } else {
        sum[codes == Q6 ? m : 0] += set_digits<0, 4>(n, g, m, from, byte_step, inverse);
      }
    }
    for (int set = 0; set < sets; set++)
      sums[((int64_t)n * sets + set) * stride + g] = unit * sum[set];
  }

  // Set bytes BEGIN to END of a group's words in a plane -> the sum of their numbers. Those of a
  // word are byte_step apart.
  template <int BEGIN, int END>
  int32_t set_digits(int n, int g, int plane, const float *from, int byte_step, float inverse) {
    const int some = std::min(words, LANES);
    int32_t sum = 0;
    for (int begin = 0; begin < words; begin += some) {
      const int word = g * words + begin;
      const int64_t block = (int64_t)(word / LANES) * x_planes_of(codes) + plane;
      auto to = (uint32_t *)(digits.data() + n * digit_bytes + block * 2 * SIZE) + word % LANES;
      for (int i = 0; i < some; i++) {
        uint32_t high = 0, low = 0;
        for (int j = BEGIN; j < END; j++) {
          const int32_t value = (int32_t)std::nearbyint(from[j * byte_step + begin + i] * inverse);
          high |= uint32_t((value + 128) >> 8 & 255) << 8 * j;
          low |= uint32_t(value & 255) << 8 * j;
          sum += value;
        }
        to[i] = high, to[i + LANES] = low;
      }
    }
    return sum;
  }
};

// Factors of a row --------------------------------------------------------------------------------

// Write s * unit of each group to factors [rows, count, sets, stride], and -o * sum(x) to `sum`
// [rows, count]. Rows after the first `present` ones are the last of these.
template <int SCALES>
static void read_factors(const Weight &w, int64_t e, int64_t row, int present, int rows,
                         const Inputs &x, const int *which, int count, float *factors,
                         Floats *sum) {
  const int sets = x.sets, stride = x.stride;
  for (int r = 0; r < rows; r++) {
    const RowScales<SCALES> of_row(w, e, row + std::min(r, present - 1));
    for (int t = 0; t < count; t++) sum[r * count + t] = spread(0.f);
    for (int g = 0; g < x.groups; g += LANES) {
      const Affine a = read_scales(w, of_row, g, std::min(x.groups - g, LANES));
      for (int t = 0; t < count; t++) {
        const Floats units = floats(x.units.data() + (int64_t)which[t] * stride + g);
        const float *sums = x.sums.data() + (int64_t)which[t] * sets * stride + g;
        float *to = factors + (r * count + t) * sets * stride + g;
        Floats &all = sum[r * count + t];
        store(to, product(a.s[0], units));
        all = subtract_product(a.o[0], floats(sums), all);
        if (sets == 1) continue;
        store(to + stride, product(a.s[1], units));
        all = subtract_product(a.o[1], floats(sums + stride), all);
      }
    }
  }
}

using ReadFactors = void (*)(const Weight &, int64_t, int64_t, int, int, const Inputs &,
                             const int *, int, float *, Floats *);
constexpr ReadFactors READ_FACTORS[] = {
    read_factors<BF16_SCALE>, read_factors<F16_SCALE>, read_factors<F32_SCALE>,
    read_factors<OF_ROW>,     read_factors<E8M0>,      read_factors<E4M3>,
    read_factors<UINT4>,      read_factors<HQQ>,       read_factors<K4>,
    read_factors<K6>,         read_factors<KX>,        nullptr,
    read_factors<F16_PAIR>};

enum Span { ONE, FOUR, SOME, EACH };  // groups of a block's words: up to 1, 4, LANES; LANES

// Give each word of a block its group's number. Load no more than is needed: a load that reaches
// over the store before it waits until that is in the cache.
template <int SPAN>
static Floats of_words(const float *groups, Bytes index) {
  if (SPAN == ONE) return spread(*groups);
  if (SPAN == EACH) return floats(groups);
  return choose(SPAN == FOUR ? four_floats(groups) : floats(groups), index);
}

// Products ----------------------------------------------------------------------------------------

struct Chunk {  // rows of an expert
  const Weight *w;
  int64_t e, row;
  int rows;
};

static void prefetch(const uint8_t *from, int64_t bytes) {
  for (int64_t n = 0; n < bytes; n += LINE) _mm_prefetch((const char *)from + n, _MM_HINT_T1);
}

// Prefetch what a chunk has beside its codes.
static void prefetch_scales(const Chunk &c) {
  for (int name = HIGH; name < PARTS; name++)
    if (c.w->part[name])
      prefetch(c.w->at(Part(name), c.e, c.row), c.rows * c.w->row_bytes[name]);
}

static void prefetch_all(const Chunk &c) {
  prefetch_scales(c);
  prefetch(c.w->at(CODES, c.e, c.row), c.rows * c.w->row_bytes[CODES]);
}

// R rows and T tokens of a pass.
template <int T, int R>
struct Pass {
  const uint8_t *codes[R], *high[R];
  const int8_t *digits[T];
  const float *factors;  // [R, T, sets, stride]
  Floats sum[R * T];
};

// Add the products of blocks `begin` to `end`. next: codes to prefetch, as many.
template <int CODES, int T, int R, int SPAN>
static void add_blocks(Pass<T, R> &pass, const Inputs &x, int begin, int end, const uint8_t *next) {
  constexpr int PLANES = planes_of(CODES), XPLANES = x_planes_of(CODES), SETS = sets_of(CODES);
  constexpr int HIGH_SIZE = high_size(CODES);
  constexpr int N = XPLANES == 4 && SETS == 2 ? 2 : PLANES / SETS;  // planes of a set
  const int stride = x.stride, shift = __builtin_ctz(x.words);
  const Bytes index = load(x.group_of);
  Floats sum[R * T];  // one by one, or they are copied as bytes, in halves
  for (int n = 0; n < R * T; n++) sum[n] = floats((const float *)(pass.sum + n));
  for (int b = begin; b < end; b++) {
    const float *factors = pass.factors + (b * LANES >> shift);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const int at = b - begin;
      _mm_prefetch((const char *)next + (at * R + r) * SIZE, _MM_HINT_T1);
      Bytes plane[PLANES];
      decode<CODES>(pass.codes[r] + at * SIZE, pass.high[r] + at * HIGH_SIZE, plane);
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) {
        const int8_t *xs = pass.digits[t] + (int64_t)b * XPLANES * 2 * SIZE;
        for (int set = 0; set < SETS; set++) {
          const int8_t *operands[N];
          for (int n = 0; n < N; n++) operands[n] = xs + (set * N + n) % XPLANES * 2 * SIZE;
          const Floats found = dot_digits<N>(plane + set * N % PLANES, operands);
          const Floats scale = of_words<SPAN>(factors + ((r * T + t) * SETS + set) * stride, index);
          sum[r * T + t] = add_product(found, scale, sum[r * T + t]);
        }
      }
    }
  }
  for (int n = 0; n < R * T; n++) store((float *)(pass.sum + n), sum[n]);
}

template <int CODES, int T, int R>
static void add_all_blocks(Pass<T, R> &pass, const Inputs &x, int begin, int end,
                           const uint8_t *next) {
  const int groups = LANES >> __builtin_ctz(x.words);  // of a block
  if (groups <= 1) return add_blocks<CODES, T, R, ONE>(pass, x, begin, end, next);
  if (groups <= 4) return add_blocks<CODES, T, R, FOUR>(pass, x, begin, end, next);
  if (groups < LANES) return add_blocks<CODES, T, R, SOME>(pass, x, begin, end, next);
  add_blocks<CODES, T, R, EACH>(pass, x, begin, end, next);
}

// A chunk times T vectors, x[which[t]] -> out [rows, T]. scratch: MANY * sets * stride floats.
// next: codes to prefetch.
template <int CODES, int T>
static void dot_packed(const Chunk &c, const Inputs &x, const int *which, float *scratch,
                       const uint8_t *next, float *out) {
  constexpr int HIGH_SIZE = high_size(CODES), R = rows_of(T);
  const Weight &w = *c.w;
  const int row_bytes = w.row_bytes[Part::CODES], whole = row_bytes / SIZE, rest = row_bytes % SIZE;
  const int high_rest = w.row_bytes[HIGH] - whole * HIGH_SIZE;
  const uint8_t *codes = w.at(Part::CODES, c.e, c.row), *high = w.at(HIGH, c.e, c.row);
  const ReadFactors read = READ_FACTORS[w.scales];
  Pass<T, R> pass;
  pass.factors = scratch;
  for (int t = 0; t < T; t++) pass.digits[t] = x.digits.data() + which[t] * x.digit_bytes;

  for (int done = 0; done < c.rows; done += R, next += R * row_bytes) {
    const int present = std::min(R, c.rows - done);
    for (int r = 0; r < R; r++) {
      const int64_t n = done + std::min(r, present - 1);
      pass.codes[r] = codes + n * row_bytes, pass.high[r] = high + n * w.row_bytes[HIGH];
    }
    read(w, c.e, c.row + done, present, R, x, which, T, scratch, pass.sum);
    // x is 0 after the row's end: its last block may go on in the next row, if there is one.
    const int64_t after = (w.out - c.row - done - present) * (int64_t)row_bytes;
    const int direct = whole + (rest && after >= SIZE);
    add_all_blocks<CODES, T, R>(pass, x, 0, direct, next);
    if (rest && direct == whole) {
      uint8_t last[R][SIZE] = {}, last_high[R][SIZE] = {};
      for (int r = 0; r < R; r++) {
        std::memcpy(last[r], pass.codes[r] + whole * SIZE, rest);
        if (HIGH_SIZE) std::memcpy(last_high[r], pass.high[r] + whole * HIGH_SIZE, high_rest);
        pass.codes[r] = last[r], pass.high[r] = last_high[r];
      }
      add_all_blocks<CODES, T, R>(pass, x, whole, whole + 1, next + R * whole * SIZE);
    }
    float found[R * T];
    sums_of<R * T>(pass.sum, found);
    std::copy_n(found, present * T, out + done * T);
  }
}

template <int T>
static void dot_bf16(const Chunk &c, const Inputs &x, const int *which, float *,
                     const uint8_t *next, float *out) {
  const Weight &w = *c.w;
  const float *values[T];
  for (int t = 0; t < T; t++) values[t] = x.values.data() + (int64_t)which[t] * x.in;
  for (int done = 0; done < c.rows; done++, out += T, next += w.row_bytes[CODES]) {
    const uint8_t *weights = w.at(CODES, c.e, c.row + done);
    Floats even[T], odd[T];  // two sums: each addition waits for the one before
    for (int t = 0; t < T; t++) even[t] = odd[t] = spread(0.f);
    int i = 0;
    for (; i + 2 * LANES <= w.in; i += 2 * LANES) {
      _mm_prefetch((const char *)next + 2 * i, _MM_HINT_T1);
      const Floats a = bf16_floats(weights + 2 * i), b = bf16_floats(weights + 2 * (i + LANES));
      for (int t = 0; t < T; t++) {
        even[t] = add_product(a, floats(values[t] + i), even[t]);
        odd[t] = add_product(b, floats(values[t] + i + LANES), odd[t]);
      }
    }
    for (int t = 0; t < T; t++) out[t] = sum_of(even[t]) + sum_of(odd[t]);
    for (; i < w.in; i++)
      for (int t = 0; t < T; t++) out[t] += bf16(weights, i) * values[t][i];
  }
}

using Dot = void (*)(const Chunk &, const Inputs &, const int *, float *, const uint8_t *, float *);

template <int T>
static Dot dot_for(int codes) {
  constexpr Dot all[] = {dot_packed<NIBBLES, T>, dot_packed<E2M1, T>, dot_packed<E2M1_HALVES, T>,
                         dot_packed<CRUMBS, T>,  dot_packed<OCTETS, T>, dot_packed<Q5, T>,
                         dot_packed<Q6, T>,      dot_packed<IQ4, T>,    dot_packed<CRUMBS3, T>,
                         dot_bf16<T>};
  return all[codes];
}

// A chunk times x[which[n]], n < count, with the rows' biases -> out [count, ROWS], by columns.
// next: the chunk after it, which is prefetched meanwhile.
static void dot_rows(const Chunk &c, const Chunk &next, Inputs &x, const int *which, int count,
                     float *scratch, float *out) {
  for (int n = 0; n < count; n++) x.need(which[n]);
  prefetch_scales(next);
  const uint8_t *ahead = next.w->at(CODES, next.e, next.row);
  for (int n = 0, some; n < count; n += some) {
    some = count - n == 3 ? 2 : std::min(count - n, MANY);
    float found[ROWS * MANY];
    const Dot dot = some == 1   ? dot_for<1>(c.w->codes)
                    : some == 2 ? dot_for<2>(c.w->codes)
                                : dot_for<MANY>(c.w->codes);
    dot(c, x, which + n, scratch, ahead, found);
    for (int t = 0; t < some; t++)
      for (int r = 0; r < c.rows; r++) {
        const float bias = c.w->part[BIAS] ? f32(c.w->at(BIAS, c.e, c.row + r)) : 0;
        out[(n + t) * ROWS + r] = found[r * some + t] + bias;
      }
  }
}
