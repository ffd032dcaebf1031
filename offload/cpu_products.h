// Rows of packed weights times a few vectors.
//
// Codes stay integers. The numbers x of a group become integers of 16 bits with a common unit, two
// digits of 8 bits each, since CPUs multiply unsigned bytes with signed ones. A weight is s * code - o,
// so a group's dot product is s * unit * sum(code * integer) - o * sum(x).
//
// Words, fields and groups: formats/words.py. A "plane" is the codes in one field of each byte.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu_vectors.h"

constexpr int MANY = 4;          // tokens that share one pass over a row
constexpr int ROWS = 16;         // rows of a pass
constexpr int LINE = 64;         // bytes that cores exchange

constexpr int PREFETCH = 4096;   // bytes between what is read and what is prefetched
constexpr int EARLY = 16384;     // bytes that a thread prefetches before a barrier
constexpr int SHARES = 75;       // percent of the rows that are shared out in advance
constexpr int PIECE = 32;        // rows that a thread takes at once of the others

// Weights -----------------------------------------------------------------------------------------

// The order of these enums is known to cpu_experts.py.
// How codes are stored; CRUMBS have 2 bits
enum Codes { NIBBLES, E2M1, E2M1_HALVES, CRUMBS, OCTETS, Q5, Q6, IQ4, CRUMBS3, BF16 };
// How scales are stored
enum Scales {
  BF16_SCALE, F16_SCALE, F32_SCALE, OF_ROW, E8M0, E4M3, UINT4, HQQ, K4, K6, KX, NO_SCALE, F16_PAIR
};
// Tensors of a weight
enum Part {
  CODES, HIGH, SCALE, ZERO, STEP, SCALE_STEP, SCALE_LOW, ZERO_STEP, ZERO_LOW, BIAS, PARTS
};

struct Weight {  // [experts, out, in]
  const uint8_t *part[PARTS];
  int64_t expert_bytes[PARTS], row_bytes[PARTS];
  int32_t codes, scales, out, in, group;
  float zero;  // the code of 0, if it is a constant

  const uint8_t *at(Part name, int64_t expert, int64_t row) const {
    return part[name] + expert * expert_bytes[name] + row * row_bytes[name];
  }
};

constexpr bool has_halves(int codes) {  // bytes are two nibbles, or products have over 16 bits
  return !WIDE_SUMS && (codes == OCTETS || codes == IQ4);
}
constexpr int planes_of(int codes) {
  switch (codes) {
    case CRUMBS: case CRUMBS3: return 4;
    case OCTETS: return WIDE_SUMS ? 1 : 2;
    case IQ4: return WIDE_SUMS ? 2 : 4;
    default: return 2;
  }
}
constexpr int fields_of(int codes) {  // codes of a word
  return codes == OCTETS ? 4 : codes == CRUMBS || codes == CRUMBS3 ? 16 : 8;
}
constexpr int x_planes_of(int codes) {  // of numbers of x; for E2M1_HALVES each has zeros in a half
  return codes == E2M1_HALVES ? 4 : fields_of(codes) / 4;
}
constexpr int sets_of(int codes) {  // planes of one scale are a set
  return codes == E2M1_HALVES || codes == Q6 || has_halves(codes) ? 2 : 1;
}

constexpr int high_size(int codes) {  // bytes of `high` that belong to SIZE bytes of codes
  return codes == Q5 ? SIZE / 4 : codes == Q6 || codes == CRUMBS3 ? SIZE / 2 : 0;
}

// The BITS above the codes of a plane, from bit TO of each byte on. SHARING words of codes have a
// word of `high` (formats/k_quants.py, KQuant; formats/hqq.py, HQQ3).
template <int SHARING, int BITS, int TO>
static Bytes above(const uint8_t *high, int plane) {
  alignas(SIZE) static const auto index = [] {
    struct { uint32_t word[LANES], shift[LANES]; } table;
    for (int n = 0; n < LANES; n++) {
      table.word[n] = n / SHARING;
      table.shift[n] = n % SHARING * (8 / SHARING);
    }
    return table;
  }();
  const Bytes words = SHARING == 2 ? load_half(high) : load_quarter(high);
  const Bytes bits = right_each(choose(words, load(index.word)), load(index.shift));
  return left(both(right(bits, BITS * plane), fill(BITS == 1 ? 0x01010101 : 0x03030303)), TO);
}

// Decode SIZE bytes of codes to the planes' unsigned bytes.
template <int CODES>
static void decode(const uint8_t *codes, const uint8_t *high, Bytes *plane) {
  const Bytes words = load(codes), low_nibbles = fill(0x0F0F0F0F);
  if constexpr (fields_of(CODES) == 16) {
    for (int n = 0; n < 4; n++) {
      plane[n] = both(right(words, 2 * n), fill(0x03030303));
      if constexpr (CODES == CRUMBS3) plane[n] = either(plane[n], above<2, 1, 2>(high, n));
    }
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
  if constexpr (CODES == IQ4) {  // the number, plus 128
    const __m128i table = _mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181,
                                        197, 217, 241);
    for (int n = 0; n < 2; n++) plane[n] = look_up(table, plane[n]);
    for (int n = 0; n < 2 && has_halves(CODES); n++) {
      plane[n + 2] = both(right(plane[n], 4), low_nibbles);
      plane[n] = both(plane[n], low_nibbles);
    }
  }
  if constexpr (CODES == Q5 || CODES == Q6)
    for (int n = 0; n < 2; n++)
      plane[n] = either(plane[n], CODES == Q5 ? above<4, 1, 4>(high, n) : above<2, 2, 4>(high, n));
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

// The index of each group's block of 8, whose numbers are `each` apart, from `first` on
static Bytes of_block(int each, int first) {
  uint32_t index[LANES];
  for (int n = 0; n < LANES; n++) index[n] = n / 8 * each + first;
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
    case F16_PAIR: {
      float scale[LANES] = {}, least[LANES] = {};
      for (int k = 0; k < n; k++) {
        scale[k] = f16(r.scale + 4 * g, 2 * k);
        least[k] = f16(r.scale + 4 * g, 2 * k + 1);
      }
      a.s[0] = floats(scale), a.o[0] = floats(least);
      return a;
    }
    case K6: {
      const Floats step = choose(load_f16(r.steps + g / 8 * 2, blocks), of_block(1, 0));
      const Bytes pairs = load_u16(r.scale + 2 * g, n);
      a.s[0] = product(to_floats(signed_right(left(pairs, 24), 24)), step);
      a.s[1] = product(to_floats(signed_right(left(pairs, 16), 24)), step);
      break;
    }
    case KX: {
      const Floats step = choose(load_f16(r.steps + g / 8 * 2, blocks), of_block(1, 0));
      a.s[0] = product(to_floats(signed_right(left(load_u8(r.scale + g, n), 24), 24)), step);
      break;
    }
  }
  a.o[0] = product(a.s[0], spread(w.zero));
  a.o[1] = product(a.s[1], spread(w.zero));
  if (has_halves(w.codes)) {
    a.s[1] = product(a.s[0], spread(16.f));
    a.o[1] = spread(0.f);
  }
  return a;
}

// Inputs ------------------------------------------------------------------------------------------

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
    const int fields = fields_of(codes);
    group = w.group, words = group / fields, groups = in / group, sets = sets_of(codes);
    stride = groups + LANES;
    blocks = (in / fields + LANES - 1) / LANES;
    digit_bytes = (int64_t)blocks * x_planes_of(codes) * 2 * SIZE;
    units.resize((int64_t)n * stride);
    sums.resize((int64_t)n * sets * stride);
    digits.resize(n * digit_bytes);
    const int64_t last = digit_bytes / blocks;  // numbers after the row's end are 0
    for (int k = 1; k <= n; k++) std::memset(digits.data() + k * digit_bytes - last, 0, last);
    if (codes == E2M1_HALVES) std::fill(digits.begin(), digits.end(), 0);
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
    const int planes = fields_of(codes) / 4, x_planes = x_planes_of(codes);
    const int byte_step = codes == Q6 ? 4 : planes * words, plane_step = codes == Q6 ? 16 : words;
    int32_t sum[2] = {0, 0};
    for (int m = 0; m < planes; m++)
      for (int j = 0; j < 4; j++) {
        const int set = codes == Q6 ? m : codes == E2M1_HALVES ? j / 2 : 0;
        const float *from = x + m * plane_step + j * byte_step;
        const int x_plane = codes == E2M1_HALVES ? set * 2 + m : m;
        int32_t added = 0;
        for (int i = 0; i < words; i++) {
          const int32_t value = (int32_t)std::nearbyint(from[i] * inverse);
          const int high = (value + 128) >> 8, word = g * words + i;
          int8_t *to = digits.data() + n * digit_bytes +
                       ((int64_t)(word / LANES) * x_planes + x_plane) * 2 * SIZE + word % LANES * 4 + j;
          to[0] = high, to[SIZE] = value - high * 256;
          added += value;
        }
        sum[set] += added;
      }
    for (int set = 0; set < sets; set++)
      sums[((int64_t)n * sets + set) * stride + g] = unit * sum[set];
  }
};

// Products ----------------------------------------------------------------------------------------

static void prefetch(const uint8_t *from, int64_t bytes) {
  for (int64_t n = 0; n < bytes; n += LINE) _mm_prefetch((const char *)from + n, _MM_HINT_T1);
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
  if (shift == 0) return floats(groups);
  return choose(LANES >> shift <= 4 ? four_floats(groups) : floats(groups), index);
}

// Rows times T vectors, x[which[t]] -> out [rows, T]. scratch: T * sets * stride floats.
template <int CODES, int T>
static void dot_packed(const Weight &w, int64_t e, int64_t row, int rows, const Inputs &x,
                       const int *which, float *scratch, float *out) {
  constexpr int PLANES = planes_of(CODES), XPLANES = x_planes_of(CODES), SETS = sets_of(CODES);
  constexpr int HIGH_SIZE = high_size(CODES);
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
    prefetch_scales(w, e, row + 1 + PREFETCH / row_bytes);
    const RowScales of_row(w, e, row);
    for (int g = 0; g < groups; g += LANES) {
      const Affine scale = read_scales(w, of_row, g, std::min(groups - g, LANES));
      for (int t = 0; t < T; t++)
        for (int set = 0; set < SETS; set++) {
          const Floats factors = product(scale.s[set], floats(units[t] + g));
          store(scratch + (t * SETS + set) * stride + g, factors);
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
          constexpr int N = XPLANES == 4 && SETS == 2 ? 2 : PLANES / SETS;  // planes of a set
          const int8_t *operands[N];
          for (int n = 0; n < N; n++) operands[n] = xs + (set * N + n) % XPLANES * 2 * SIZE;
          const Floats found = dot_digits<N>(plane + set * N % PLANES, operands);
          const float *scales = scratch + (t * SETS + set) * stride + first_group;
          sum[t] = add_product(found, of_words(scales, shift, index), sum[t]);
        }
      }
    };

    const uint8_t *codes = w.at(Part::CODES, e, row), *high = w.at(HIGH, e, row);
    for (int b = 0; b < whole; b++) {
      _mm_prefetch((const char *)codes + b * SIZE + PREFETCH, _MM_HINT_T1);
      block(b, codes + b * SIZE, high + b * HIGH_SIZE);
    }
    if (rest) {  // x is 0 after the row's end
      uint8_t last[SIZE] = {}, last_high[SIZE] = {};
      std::memcpy(last, codes + whole * SIZE, rest);
      if (HIGH_SIZE)
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
      _mm_prefetch((const char *)weights + 2 * i + PREFETCH, _MM_HINT_T1);
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
                         dot_packed<Q6, T>,      dot_packed<IQ4, T>,    dot_packed<CRUMBS3, T>,
                         dot_bf16<T>};
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
