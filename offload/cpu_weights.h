// Packed weights: how codes and scales are stored, and how both are read.
//
// Words, fields and groups: formats/words.py. A "plane" is the codes in one field of each byte.

#pragma once

#include <algorithm>

#include "cpu_vectors.h"

constexpr int LINE = 64;  // bytes that cores exchange

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
template <int SCALES>
struct RowScales {
  const uint8_t *scale, *zero, *steps;
  Floats step, low, zero_step, zero_low;

  RowScales(const Weight &w, int64_t e, int64_t row) {
    scale = w.at(SCALE, e, row), zero = w.at(ZERO, e, row), steps = w.at(STEP, e, row);
    if (SCALES == OF_ROW) step = spread(bf16(scale));
    // As the bits of fp32 e4m3 is 2 ** -120 as large, and the table has twice the numbers.
    if (SCALES == E4M3) step = spread(f32(w.at(SCALE_STEP, e, row)) * 0x1p119f);
    if (SCALES != HQQ) return;
    step = spread(bf16(w.at(SCALE_STEP, e, row))), low = spread(bf16(w.at(SCALE_LOW, e, row)));
    zero_step = spread(bf16(w.at(ZERO_STEP, e, row)));
    zero_low = spread(bf16(w.at(ZERO_LOW, e, row)));
  }
};

// Read the scales of groups g to g + n, n up to LANES; others become finite numbers.
template <int SCALES>
static Affine read_scales(const Weight &w, const RowScales<SCALES> &r, int g, int n) {
  Affine a = {};
  const int blocks = (n + 7) / 8;
  switch (SCALES) {
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
