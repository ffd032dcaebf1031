// Vectors of AVX-512 or AVX2, under one set of names.
//
// A vector of SIZE bytes is `Bytes`: codes, or words of 32 bits; `Floats` has as many fp32 numbers.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

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
// The sum of N planes' products with both digits of x: those of a plane are SIZE bytes apart
template <int N>
static Floats dot_digits(const Bytes *planes, const int8_t *const *x) {
  Bytes sum = none();
  for (int n = 0; n < N; n++) sum = dot(sum, planes[n], load(x[n]));
  sum = _mm512_slli_epi32(sum, 8);
  for (int n = 0; n < N; n++) sum = dot(sum, planes[n], load(x[n] + SIZE));
  return _mm512_cvtepi32_ps(sum);
}
static Floats floats(const float *p) { return _mm512_loadu_ps(p); }
static Floats four_floats(const float *p) { return _mm512_castps128_ps512(_mm_loadu_ps(p)); }
static Floats choose(Floats values, Bytes index) { return _mm512_permutexvar_ps(index, values); }
static Floats add_product(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
static Floats subtract_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
static float sum_of(Floats a) { return _mm512_reduce_add_ps(a); }
// a's neighbors added, and b's: those of a come first in each 64 bits of the result
static Floats add_pairs(Floats a, Floats b) {
  return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
static Floats add_fours(Floats a, Floats b) {
  const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
// The sums of four vectors
static void four_sums(const Floats *a, float *to) {
  const Floats all = add_fours(add_pairs(a[0], a[1]), add_pairs(a[2], a[3]));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
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
  if (n >= 16) return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first(n), p));
}
static Bytes load_u16(const uint8_t *p, int n) {
  if (n >= 16) return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
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
static Floats to_floats(Bytes a) { return _mm256_cvtepi32_ps(a); }
template <int N>
static Floats dot_digits(const Bytes *planes, const int8_t *const *x) {
  Bytes high = none(), low = none();
  for (int n = 0; n < N; n++) {
    high = dot(high, planes[n], load(x[n]));
    low = dot(low, planes[n], load(x[n] + SIZE));
  }
  high = _mm256_madd_epi16(high, _mm256_set1_epi16(256));
  low = _mm256_madd_epi16(low, _mm256_set1_epi16(1));
  return to_floats(_mm256_add_epi32(high, low));
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
static void four_sums(const Floats *a, float *to) {
  for (int n = 0; n < 4; n++) to[n] = sum_of(a[n]);
}
static Floats product(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
static Floats as_floats(Bytes a) { return _mm256_castsi256_ps(a); }
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
#error "the CPU has no AVX2, FMA or F16C"
#endif

constexpr int LANES = SIZE / 4;  // words of a vector

template <int N>
static void sums_of(const Floats *a, float *to) {
  if constexpr (N == 4) return four_sums(a, to);
  for (int n = 0; n < N; n++) to[n] = sum_of(a[n]);
}
