// Products of packed experts on a CPU, for few tokens. offload/cpu_experts.py builds and calls this.
//
// One call computes a layer's missing experts in four phases, with a barrier after each:
//
//   1. x becomes integers in the order of the codes (prepare)
//   2. gate and up, activation              rows of all chosen experts, shared out evenly
//   3. h becomes integers
//   4. down, times the pair's weight, added to y          rows of y, shared out evenly
//
// Codes stay integers: x of a group becomes integers of 16 bits with a common unit, as two digits of
// 8 bits, since CPUs multiply unsigned bytes with signed ones. A weight is s * code - o, so
// a group's dot product is s * unit * sum(code * integer) - o * sum(x).
//
// Words, fields and groups: formats/words.py. A "plane" is the codes in one field of each byte.

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

// Vectors ------------------------------------------------------------------------------------------

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

using Bytes = __m512i;
using Floats = __m512;
constexpr int SIZE = 64;
constexpr bool WIDE_SUMS = true;  // sums of products of bytes have 32 bits

static Bytes load(const void *p) { return _mm512_loadu_si512(p); }
static Bytes load_half(const void *p) {
  return _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p));
}
static Bytes load_quarter(const void *p) {
  return _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
}
static Bytes fill(uint32_t word) { return _mm512_set1_epi32(word); }
static Bytes none() { return _mm512_setzero_si512(); }
static Bytes both(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
static Bytes either(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
static Bytes flip(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
static Bytes right(Bytes a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
static Bytes left(Bytes a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
static Bytes right_each(Bytes a, Bytes n) { return _mm512_srlv_epi32(a, n); }
static Bytes choose(Bytes words, Bytes index) { return _mm512_permutexvar_epi32(index, words); }
static Bytes look_up(__m128i table, Bytes index) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), index);
}
// sum += the products of four neighboring bytes, unsigned times signed
static Bytes dot(Bytes sum, Bytes codes, Bytes x) { return _mm512_dpbusd_epi32(sum, codes, x); }
static Floats total(Bytes high, Bytes low) {
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
}
static Floats floats(const float *p) { return _mm512_loadu_ps(p); }
static Floats four_floats(const float *p) { return _mm512_castps128_ps512(_mm_loadu_ps(p)); }
static Floats choose(Floats values, Bytes index) { return _mm512_permutexvar_ps(index, values); }
static Floats add_product(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
static Floats subtract_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
static float sum_of(Floats a) { return _mm512_reduce_add_ps(a); }
static Floats product(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
static Floats as_floats(Bytes a) { return _mm512_castsi512_ps(a); }
static Floats to_floats(Bytes a) { return _mm512_cvtepi32_ps(a); }
static Floats spread(float a) { return _mm512_set1_ps(a); }
static Bytes larger(Bytes a, Bytes b) { return _mm512_max_epi32(a, b); }
static Bytes signed_right(Bytes a, int n) { return _mm512_sra_epi32(a, _mm_cvtsi32_si128(n)); }
static void store(float *p, Floats a) { _mm512_storeu_ps(p, a); }
// The first n of LANES numbers, or all; 0 for the others
static uint32_t first(int n) { return _bzhi_u32(~0u, n); }
static Bytes load_u8(const uint8_t *p, int n) {
  return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first(n), p));
}
static Bytes load_u16(const uint8_t *p, int n) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
}
static Floats load_f16(const uint8_t *p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
}
static Floats load_f32(const uint8_t *p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

using Bytes = __m256i;
using Floats = __m256;
constexpr int SIZE = 32;
constexpr bool WIDE_SUMS = false;  // 16 bits: a block's products must fit

static Bytes load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
static Bytes load_half(const void *p) {
  return _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p));
}
static Bytes load_quarter(const void *p) {
  return _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)p));
}
static Bytes fill(uint32_t word) { return _mm256_set1_epi32(word); }
static Bytes none() { return _mm256_setzero_si256(); }
static Bytes both(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
static Bytes either(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
static Bytes flip(Bytes a, Bytes b) { return _mm256_xor_si256(a, b); }
static Bytes right(Bytes a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
static Bytes left(Bytes a, int n) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(n)); }
static Bytes right_each(Bytes a, Bytes n) { return _mm256_srlv_epi32(a, n); }
static Bytes choose(Bytes words, Bytes index) { return _mm256_permutevar8x32_epi32(words, index); }
static Bytes look_up(__m128i table, Bytes index) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), index);
}
static Bytes dot(Bytes sum, Bytes codes, Bytes x) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));
}
static Floats total(Bytes high, Bytes low) {
  high = _mm256_madd_epi16(high, _mm256_set1_epi16(256));
  low = _mm256_madd_epi16(low, _mm256_set1_epi16(1));
  return _mm256_cvtepi32_ps(_mm256_add_epi32(high, low));
}
static Floats floats(const float *p) { return _mm256_loadu_ps(p); }
static Floats four_floats(const float *p) { return _mm256_castps128_ps256(_mm_loadu_ps(p)); }
static Floats choose(Floats values, Bytes index) { return _mm256_permutevar8x32_ps(values, index); }
static Floats add_product(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
static Floats subtract_product(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
static float sum_of(Floats a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
static Floats product(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
static Floats as_floats(Bytes a) { return _mm256_castsi256_ps(a); }
static Floats to_floats(Bytes a) { return _mm256_cvtepi32_ps(a); }
static Floats spread(float a) { return _mm256_set1_ps(a); }
static Bytes larger(Bytes a, Bytes b) { return _mm256_max_epi32(a, b); }
static Bytes signed_right(Bytes a, int n) { return _mm256_sra_epi32(a, _mm_cvtsi32_si128(n)); }
static void store(float *p, Floats a) { _mm256_storeu_ps(p, a); }
// The first n of 8 numbers of `size` bytes, or all; 0 for the others
static __m256i first(const uint8_t *p, int n, int size) {
  alignas(32) uint8_t bytes[32] = {};
  if (n < 8) {
    std::memcpy(bytes, p, n * size);
    return _mm256_load_si256((const __m256i *)bytes);
  }
  if (size == 4) return load(p);
  const __m128i *from = (const __m128i *)p;
  return _mm256_castsi128_si256(size == 2 ? _mm_loadu_si128(from) : _mm_loadl_epi64(from));
}
static Bytes load_u8(const uint8_t *p, int n) {
  return _mm256_cvtepu8_epi32(_mm256_castsi256_si128(first(p, n, 1)));
}
static Bytes load_u16(const uint8_t *p, int n) {
  return _mm256_cvtepu16_epi32(_mm256_castsi256_si128(first(p, n, 2)));
}
static Floats load_f16(const uint8_t *p, int n) {
  return _mm256_cvtph_ps(_mm256_castsi256_si128(first(p, n, 2)));
}
static Floats load_f32(const uint8_t *p, int n) { return as_floats(first(p, n, 4)); }

#else
#error "needs AVX2, FMA and F16C"
#endif

constexpr int LANES = SIZE / 4;  // words of a vector
constexpr int MANY = 4;          // tokens that share one pass over a row
constexpr int ROWS = 16;         // rows of a pass
constexpr int LINE = 64;         // bytes that cores exchange

#ifndef PREFETCH
#define PREFETCH 4096  // bytes between what is read and what is prefetched
#endif
#ifndef EARLY
#define EARLY 16384  // bytes that a thread prefetches before a barrier
#endif
#ifndef SHARES
#define SHARES 75  // percent of the rows that are shared out in advance
#endif

// Weights ------------------------------------------------------------------------------------------

// How codes are stored. The numbers are those of CODES in cpu_experts.py.
enum Codes { NIBBLES, E2M1, E2M1_HALVES, CRUMBS, OCTETS, Q5, Q6, BF16 };
// How scales are stored: SCALES in cpu_experts.py
enum Scales { BF16_SCALE, F16_SCALE, F32_SCALE, OF_ROW, E8M0, E4M3, UINT4, HQQ, K4, K6, NO_SCALE };
// Tensors of a weight: PARTS in cpu_experts.py
enum Part { CODES, HIGH, SCALE, ZERO, STEP, SCALE_STEP, SCALE_LOW, ZERO_STEP, ZERO_LOW, BIAS, PARTS };

struct Weight {  // [experts, out, in]
  const uint8_t *part[PARTS];
  int64_t expert_bytes[PARTS], row_bytes[PARTS];
  int32_t codes, scales, out, in, group;
  float zero;  // the code of 0, if it is a constant

  const uint8_t *at(Part name, int64_t expert, int64_t row) const {
    return part[name] + expert * expert_bytes[name] + row * row_bytes[name];
  }
};

constexpr int planes_of(int codes) {
  switch (codes) {
    case E2M1_HALVES: case CRUMBS: return 4;
    case OCTETS: return WIDE_SUMS ? 1 : 2;  // two nibbles, so that products fit into 16 bits
    default: return 2;
  }
}
constexpr int x_planes_of(int codes) {  // planes that meet other numbers of x
  return codes == OCTETS ? 1 : codes == CRUMBS ? 4 : 2;
}
constexpr int sets_of(int codes) {  // planes of one scale are a set
  return codes == E2M1_HALVES || codes == Q6 || (codes == OCTETS && !WIDE_SUMS) ? 2 : 1;
}

// The bits above the codes of a plane, from bit 4 of each byte on (formats/k_quants.py, KQuant).
template <int BITS>
static Bytes above(const uint8_t *high, int plane) {
  constexpr int SHARING = 4 / BITS;  // words of codes that have a word of high
  alignas(SIZE) static const auto index = [] {
    struct { uint32_t word[LANES], shift[LANES]; } table;
    for (int n = 0; n < LANES; n++) {
      table.word[n] = n / SHARING;
      table.shift[n] = n % SHARING * 2 * BITS;
    }
    return table;
  }();
  const Bytes words = SHARING == 2 ? load_half(high) : load_quarter(high);
  const Bytes bits = right_each(choose(words, load(index.word)), load(index.shift));
  return left(both(right(bits, BITS * plane), fill(BITS == 1 ? 0x01010101 : 0x03030303)), 4);
}

// Decode SIZE bytes of codes to the planes' unsigned bytes.
template <int CODES>
static void decode(const uint8_t *codes, const uint8_t *high, Bytes *plane) {
  const Bytes words = load(codes), low_nibbles = fill(0x0F0F0F0F);
  if constexpr (CODES == CRUMBS) {
    for (int n = 0; n < 4; n++) plane[n] = both(right(words, 2 * n), fill(0x03030303));
    return;
  }
  if constexpr (CODES == OCTETS && WIDE_SUMS) {
    plane[0] = flip(words, fill(0x80808080));  // code + 128
    return;
  }
  const Bytes bytes = CODES == OCTETS ? flip(words, fill(0x80808080)) : words;
  plane[0] = both(bytes, low_nibbles);
  plane[1] = both(right(bytes, 4), low_nibbles);
  if constexpr (CODES == E2M1 || CODES == E2M1_HALVES) {  // twice the number, plus 12
    const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    for (int n = 0; n < 2; n++) plane[n] = look_up(table, plane[n]);
  }
  if constexpr (CODES == E2M1_HALVES)
    for (int n = 0; n < 2; n++) {
      plane[n + 2] = both(plane[n], fill(0xFFFF0000));
      plane[n] = both(plane[n], fill(0x0000FFFF));
    }
  if constexpr (CODES == Q5 || CODES == Q6)
    for (int n = 0; n < 2; n++)
      plane[n] = either(plane[n], above<CODES == Q5 ? 1 : 2>(high, n));
}

static float bf16(const uint8_t *p, int n = 0) {
  uint16_t half;
  std::memcpy(&half, p + 2 * n, 2);
  uint32_t word = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
static float f16(const uint8_t *p, int n = 0) {
  uint16_t half;
  std::memcpy(&half, p + 2 * n, 2);
  return _cvtsh_ss(half);
}
static float f32(const uint8_t *p, int n = 0) {
  float value;
  std::memcpy(&value, p + 4 * n, 4);
  return value;
}
static Floats bf16_floats(const uint8_t *p, int n = LANES) {
  return as_floats(left(load_u16(p, n), 16));
}

// LANES groups of a row: a weight is s[set] * code - o[set].
struct Affine {
  Floats s[2], o[2];
};

// The numbers at 2 * (n / 8) + odd, for lane n: of q4_k's blocks of 8 groups
static Bytes of_block(int factor, int odd) {
  uint32_t index[LANES];
  for (int n = 0; n < LANES; n++) index[n] = factor * (n / 8) + odd;
  return load(index);
}

// What a row's scales are read from.
struct RowScales {
  const uint8_t *scale, *zero, *steps;
  Floats step, low, zero_step, zero_low;

  RowScales(const Weight &w, int64_t e, int64_t row) {
    scale = w.at(SCALE, e, row), zero = w.at(ZERO, e, row), steps = w.at(STEP, e, row);
    if (w.scales == OF_ROW) step = spread(bf16(scale));
    // As the bits of fp32 e4m3 is 2 ** -120 as large, and the table has twice the numbers.
    if (w.scales == E4M3) step = spread(f32(w.at(SCALE_STEP, e, row)) * 0x1p119f);
    if (w.scales != HQQ) return;
    step = spread(bf16(w.at(SCALE_STEP, e, row))), low = spread(bf16(w.at(SCALE_LOW, e, row)));
    zero_step = spread(bf16(w.at(ZERO_STEP, e, row)));
    zero_low = spread(bf16(w.at(ZERO_LOW, e, row)));
  }
};

// Read the scales of groups g to g + n, n up to LANES; others become finite numbers.
static Affine read_scales(const Weight &w, const RowScales &r, int g, int n) {
  Affine a = {};
  const int blocks = (n + 7) / 8;
  switch (w.scales) {
    case BF16_SCALE: a.s[0] = bf16_floats(r.scale + 2 * g, n); break;
    case F16_SCALE: a.s[0] = load_f16(r.scale + 2 * g, n); break;
    case F32_SCALE: a.s[0] = load_f32(r.scale + 4 * g, n); break;
    case OF_ROW: a.s[0] = r.step; break;
    case E8M0:  // half of it: the table has twice the numbers
      a.s[0] = as_floats(larger(left(load_u8(r.scale + g, n), 23), fill(1u << 22)));
      a.s[0] = product(a.s[0], spread(.5f));
      break;
    case E4M3: {
      const Bytes pairs = load_u16(r.scale + 2 * g, n), magnitude = fill(0x7Fu << 20);
      a.s[0] = product(as_floats(both(left(pairs, 20), magnitude)), r.step);
      a.s[1] = product(as_floats(both(left(pairs, 12), magnitude)), r.step);
      break;
    }
    case UINT4:
      a.s[0] = bf16_floats(r.scale + 2 * g, n);
      a.o[0] = product(a.s[0], to_floats(load_u8(r.zero + g, n)));
      return a;
    case HQQ: {
      const Floats zero = to_floats(load_u8(r.zero + g, n));
      a.s[0] = add_product(to_floats(load_u8(r.scale + g, n)), r.step, r.low);
      a.o[0] = product(a.s[0], add_product(zero, r.zero_step, r.zero_low));
      return a;
    }
    case K4: {
      const Floats steps = load_f16(r.steps + g / 8 * 4, 2 * blocks);
      const Bytes pairs = load_u16(r.scale + 2 * g, n);
      a.s[0] = product(to_floats(both(pairs, fill(0xFFu))), choose(steps, of_block(2, 0)));
      a.o[0] = product(to_floats(right(pairs, 8)), choose(steps, of_block(2, 1)));
      return a;
    }
    case K6: {
      const Floats step = choose(load_f16(r.steps + g / 8 * 2, blocks), of_block(1, 0));
      const Bytes pairs = load_u16(r.scale + 2 * g, n);
      a.s[0] = product(to_floats(signed_right(left(pairs, 24), 24)), step);
      a.s[1] = product(to_floats(signed_right(left(pairs, 16), 24)), step);
      break;
    }
  }
  a.o[0] = product(a.s[0], spread(w.zero));
  a.o[1] = product(a.s[1], spread(w.zero));
  if (w.codes == OCTETS) {  // two nibbles
    a.s[1] = product(a.s[0], spread(16.f));
    a.o[1] = spread(0.f);
  }
  return a;
}

// Inputs -------------------------------------------------------------------------------------------

// Vectors x [in] in the order of a weight's codes.
struct Inputs {
  int codes, in, group, words, groups, stride, sets, blocks;  // words: of a group
  int64_t digit_bytes;
  std::vector<float> values, units, sums;  // [n, in], [n, stride], [n, sets, stride]
  std::vector<int8_t> digits;              // [n, blocks, x planes, high and low, SIZE]
  uint32_t group_of[LANES];                // of each word of a block that begins with a group

  void resize(const Weight &w, int n) {
    codes = w.codes, in = w.in;
    values.resize((int64_t)n * in + LANES);
    if (codes == BF16) return;
    const int fields = codes == CRUMBS ? 16 : codes == OCTETS ? 4 : 8;
    group = w.group, words = group / fields, groups = in / group, sets = sets_of(codes);
    stride = groups + LANES;
    blocks = (in / fields + LANES - 1) / LANES;
    digit_bytes = (int64_t)blocks * x_planes_of(codes) * 2 * SIZE;
    units.resize((int64_t)n * stride);
    sums.resize((int64_t)n * sets * stride);
    digits.resize(n * digit_bytes);
    const int64_t last = digit_bytes / blocks;  // numbers after the row's end are 0
    for (int k = 1; k <= n; k++) std::memset(digits.data() + k * digit_bytes - last, 0, last);
    for (int k = 1; k <= n; k++) std::fill_n(units.data() + k * stride - LANES, LANES, 0.f);
    for (int k = 1; k <= n * sets; k++) std::fill_n(sums.data() + k * stride - LANES, LANES, 0.f);
    const int shift = __builtin_ctz(words);
    for (int lane = 0; lane < LANES; lane++) group_of[lane] = lane >> shift;
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
    const int planes = x_planes_of(codes);
    const int byte_step = codes == Q6 ? 4 : planes * words, plane_step = codes == Q6 ? 16 : words;
    int32_t sum[2] = {0, 0};
    for (int m = 0; m < planes; m++)
      for (int j = 0; j < 4; j++) {
        const int set = codes == Q6 ? m : codes == E2M1_HALVES ? j / 2 : 0;
        const float *from = x + m * plane_step + j * byte_step;
        int32_t added = 0;
        for (int i = 0; i < words; i++) {
          const int32_t value = (int32_t)std::nearbyint(from[i] * inverse);
          const int high = (value + 128) >> 8, word = g * words + i;
          int8_t *to = digits.data() + n * digit_bytes +
                       ((int64_t)(word / LANES) * planes + m) * 2 * SIZE + word % LANES * 4 + j;
          to[0] = high, to[SIZE] = value - high * 256;
          added += value;
        }
        sum[set] += added;
      }
    for (int set = 0; set < sets; set++)
      sums[((int64_t)n * sets + set) * stride + g] = unit * sum[set];
  }
};

// Products -----------------------------------------------------------------------------------------

static void prefetch(const uint8_t *from, int64_t bytes) {
  for (int64_t n = 0; n < bytes; n += LINE) _mm_prefetch((const char *)from + n, _MM_HINT_T0);
}

// Prefetch what a row has beside its codes. Past the tensor's end a prefetch does nothing.
static void prefetch_scales(const Weight &w, int64_t e, int64_t row) {
  for (int name = HIGH; name < PARTS; name++)
    if (w.part[name]) prefetch(w.at(Part(name), e, row), w.row_bytes[name]);
}

// Prefetch the first of some rows: as many as `dot_rows` is ahead, or the given bytes.
static void prefetch_rows(const Weight &w, int64_t e, int64_t row, int64_t rows,
                          int64_t bytes = PREFETCH) {
  rows = std::min(rows, 1 + bytes / w.row_bytes[CODES]);
  prefetch(w.at(CODES, e, row), std::min(bytes, rows * w.row_bytes[CODES]));
  for (int64_t n = 0; n < rows; n++) prefetch_scales(w, e, row + n);
}

// Give each word of a block its group's number; 2 ** shift words are a group. Load no more than is
// needed: a load that reaches over the store before it waits until that is in the cache.
static Floats of_words(const float *groups, int shift, Bytes index) {
  if (LANES >> shift <= 1) return spread(*groups);
  return choose(LANES >> shift <= 4 ? four_floats(groups) : floats(groups), index);
}

// Rows times T vectors, x[which[t]] -> out [rows, T]. scratch: T * sets * stride floats.
template <int CODES, int T>
static void dot_packed(const Weight &w, int64_t e, int64_t row, int rows, const Inputs &x,
                       const int *which, float *scratch, float *out) {
  constexpr int PLANES = planes_of(CODES), XPLANES = x_planes_of(CODES), SETS = sets_of(CODES);
  constexpr int HIGH_SIZE = CODES == Q5 ? SIZE / 4 : SIZE / 2;
  const int stride = x.stride, groups = x.groups, shift = __builtin_ctz(x.words);
  const Bytes index = load(x.group_of);
  const int8_t *digits[T];
  const float *units[T], *sums[T];
  for (int t = 0; t < T; t++) {
    digits[t] = x.digits.data() + which[t] * x.digit_bytes;
    units[t] = x.units.data() + (int64_t)which[t] * stride;
    sums[t] = x.sums.data() + (int64_t)which[t] * SETS * stride;
  }
  const int row_bytes = w.row_bytes[Part::CODES], whole = row_bytes / SIZE, rest = row_bytes % SIZE;

  for (; rows; rows--, row++, out += T) {
    Floats sum[T];
    for (int t = 0; t < T; t++) sum[t] = spread(0.f);
    if (PREFETCH) prefetch_scales(w, e, row + 1 + PREFETCH / row_bytes);
    const RowScales of_row(w, e, row);
    for (int g = 0; g < groups; g += LANES) {
      const Affine scale = read_scales(w, of_row, g, std::min(groups - g, LANES));
      for (int t = 0; t < T; t++)
        for (int set = 0; set < SETS; set++) {
          store(scratch + (t * SETS + set) * stride + g, product(scale.s[set], floats(units[t] + g)));
          sum[t] = subtract_product(scale.o[set], floats(sums[t] + set * stride + g), sum[t]);
        }
    }

    auto block = [&](int b, const uint8_t *codes, const uint8_t *high) {
      Bytes plane[PLANES];
      decode<CODES>(codes, high, plane);
      const int first_group = b * LANES >> shift;
      for (int t = 0; t < T; t++) {
        const int8_t *xs = digits[t] + (int64_t)b * XPLANES * 2 * SIZE;
        for (int set = 0; set < SETS; set++) {
          Bytes upper = none(), lower = none();
          for (int p = set * PLANES / SETS; p < (set + 1) * PLANES / SETS; p++) {
            const int8_t *operand = xs + p % XPLANES * 2 * SIZE;
            upper = dot(upper, plane[p], load(operand));
            lower = dot(lower, plane[p], load(operand + SIZE));
          }
          const float *scales = scratch + (t * SETS + set) * stride + first_group;
          sum[t] = add_product(total(upper, lower), of_words(scales, shift, index), sum[t]);
        }
      }
    };

    const uint8_t *codes = w.at(Part::CODES, e, row), *high = w.at(HIGH, e, row);
    for (int b = 0; b < whole; b++) {
      if (PREFETCH) _mm_prefetch((const char *)codes + b * SIZE + PREFETCH, _MM_HINT_T0);
      block(b, codes + b * SIZE, high + b * HIGH_SIZE);
    }
    if (rest) {  // x is 0 after the row's end
      uint8_t last[SIZE] = {}, last_high[SIZE] = {};
      std::memcpy(last, codes + whole * SIZE, rest);
      if (CODES == Q5 || CODES == Q6)
        std::memcpy(last_high, high + whole * HIGH_SIZE, w.row_bytes[HIGH] - whole * HIGH_SIZE);
      block(whole, last, last_high);
    }
    for (int t = 0; t < T; t++) out[t] = sum_of(sum[t]);
  }
}

template <int T>
static void dot_bf16(const Weight &w, int64_t e, int64_t row, int rows, const Inputs &x,
                     const int *which, float *, float *out) {
  const float *values[T];
  for (int t = 0; t < T; t++) values[t] = x.values.data() + (int64_t)which[t] * x.in;
  for (; rows; rows--, row++, out += T) {
    const uint8_t *weights = w.at(CODES, e, row);
    Floats even[T], odd[T];  // two sums: each addition waits for the one before
    for (int t = 0; t < T; t++) even[t] = odd[t] = spread(0.f);
    int i = 0;
    for (; i + 2 * LANES <= w.in; i += 2 * LANES) {
      if (PREFETCH) _mm_prefetch((const char *)weights + 2 * i + PREFETCH, _MM_HINT_T0);
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

using Dot = void (*)(const Weight &, int64_t, int64_t, int, const Inputs &, const int *, float *,
                     float *);

template <int T>
static Dot dot_for(int codes) {
  constexpr Dot all[] = {dot_packed<NIBBLES, T>, dot_packed<E2M1, T>, dot_packed<E2M1_HALVES, T>,
                         dot_packed<CRUMBS, T>,  dot_packed<OCTETS, T>, dot_packed<Q5, T>,
                         dot_packed<Q6, T>,      dot_bf16<T>};
  return all[codes];
}

// Rows times x[which[n]], n < count, with the rows' biases -> out [count, ROWS], by columns.
static void dot_rows(const Weight &w, int64_t e, int64_t row, int rows, const Inputs &x,
                     const int *which, int count, float *scratch, float *out) {
  for (int n = 0, some; n < count; n += some) {
    some = count - n == 3 ? 2 : std::min(count - n, MANY);
    float found[ROWS * MANY];
    const Dot dot = some == 1   ? dot_for<1>(w.codes)
                    : some == 2 ? dot_for<2>(w.codes)
                                : dot_for<MANY>(w.codes);
    dot(w, e, row, rows, x, which + n, scratch, found);
    for (int t = 0; t < some; t++)
      for (int r = 0; r < rows; r++) {
        const float bias = w.part[BIAS] ? f32(w.at(BIAS, e, row + r)) : 0;
        out[(n + t) * ROWS + r] = found[r * some + t] + bias;
      }
  }
}

enum Activation { SILU, CLAMPED, GELU };  // ACTIVATIONS in cpu_experts.py

static float activate(int kind, float limit, float alpha, float gate, float up) {
  if (kind == SILU) return gate / (1 + std::exp(-gate)) * up;
  if (kind == GELU) {
    const float inner = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
    return .5f * gate * (1 + std::tanh(inner)) * up;
  }
  gate = std::min(gate, limit);
  up = std::min(std::max(up, -limit), limit);
  return gate / (1 + std::exp(-alpha * gate)) * (up + 1);
}

// Threads ------------------------------------------------------------------------------------------

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
    const int64_t begin = next.value.fetch_add(ROWS, std::memory_order_relaxed);
    if (begin >= rest) return;
    visit(shares * threads + begin, shares * threads + std::min(begin + ROWS, rest));
  }
}

// One layer ----------------------------------------------------------------------------------------

struct Layer {
  Weight w13, w2;
  int32_t activation;
  float limit, alpha;
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
      x.values[i] = call.dtype == X_BF16 ? bf16(from, i) : call.dtype == X_F16 ? f16(from, i) : f32(from, i);
    if (x.codes != BF16) x.prepare(n / x.groups, n % x.groups);
  }
}

static void gate_up(Call &call, Pool &pool, int thread, float *scratch, float *out) {
  const Layer &layer = *call.layer;
  const int64_t width = layer.w13.out / 2;
  auto visit = [&](int64_t begin, int64_t end) {
    for (int64_t n = begin, rows; n < end; n += rows) {
      const int64_t u = n / width, row = n % width;
      rows = std::min({(int64_t)ROWS, width - row, end - n});
      const int first = pool.first[u], count = pool.first[u + 1] - first, e = pool.experts[u];
      const int *tokens = pool.tokens.data() + first;
      float *up = out + count * ROWS;
      dot_rows(layer.w13, e, row, rows, pool.x, tokens, count, scratch, out);
      dot_rows(layer.w13, e, row + width, rows, pool.x, tokens, count, scratch, up);
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
    for (int t = 0; t < call.n_tokens; t++)
      std::fill(call.y + (int64_t)t * w.out + begin, call.y + (int64_t)t * w.out + end, 0.f);
    for (size_t u = 0; u < pool.experts.size(); u++) {
      const int first = pool.first[u], count = pool.first[u + 1] - first, e = pool.experts[u];
      for (int64_t row = begin, rows; row < end; row += rows) {
        rows = std::min((int64_t)ROWS, end - row);
        if (row + rows == end && u + 1 < pool.experts.size())
          prefetch_rows(w, pool.experts[u + 1], begin, end - begin);
        dot_rows(w, e, row, rows, pool.h, pool.in_order.data() + first, count, scratch, out);
        for (int k = 0; k < count; k++) {
          const float weight = call.weights[pool.pairs[first + k]];
          float *y = call.y + (int64_t)pool.tokens[first + k] * w.out + row;
          for (int r = 0; r < rows; r++) y[r] += weight * out[k * ROWS + r];
        }
      }
    }
  };
  share_out(w.out, thread, pool.count, pool.next_down, visit);
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
  const int64_t width = w13.out / 2, shares = shares_of(width * pool.experts.size(), pool.count);
  const int64_t begin = shares * thread, u = begin / width, row = begin % width;
  for (int64_t half : {row, row + width})  // memory would be idle until the barrier
    prefetch_rows(w13, pool.experts[u], half, std::min(shares, width - row), EARLY);
  read_x(call, pool, thread);
  pool.wait_for_all(thread);
  gate_up(call, pool, thread, scratch.data(), out.data());
  const int64_t down_shares = shares_of(w2.out, pool.count);
  prefetch_rows(w2, pool.experts[0], down_shares * thread, down_shares, EARLY);
  pool.wait_for_all(thread);
  if (pool.h.codes != BF16) {
    const Range range((int64_t)pool.pairs.size() * pool.h.groups, thread, pool.count);
    for (int64_t n = range.begin; n < range.end; n++) pool.h.prepare(n / pool.h.groups, n % pool.h.groups);
    pool.wait_for_all(thread);
  }
  down(call, pool, thread, scratch.data(), out.data());
}

// Sort the pairs by expert, experts in the order of their first pair.
static void sort_pairs(const Call &call, Pool &pool) {
  pool.experts.clear(), pool.pairs.clear(), pool.tokens.clear(), pool.first.clear();
  const int n_pairs = *call.n_pairs;
  for (int n = 0; n < n_pairs; n++) {
    const int expert = call.experts[n];
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
  if (*call->n_pairs == 0) {
    std::fill(call->y, call->y + (int64_t)call->n_tokens * w2.out, 0.f);
    return;
  }
  sort_pairs(*call, pool);
  pool.x.resize(call->layer->w13, call->n_tokens);
  pool.h.resize(w2, pool.pairs.size());
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
