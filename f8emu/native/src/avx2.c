/* 256-bit vectors: AVX2 and FMA (Haswell, Zen and newer). The control register holds the rounding. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#include <immintrin.h>
#include <stdint.h>

#define NAME f8_avx2
#define NAME_TEXT "AVX2"
#define LANES 8
#define COLUMNS 32
#define TOGETHER 1
#define MAGNITUDES 1

typedef __m256 vf;
typedef __m256i vi, vb, v_mask;

static inline vb vb_load(const uint8_t *x) { return _mm256_loadu_si256((const __m256i *)x); }
static inline void vb_store(uint8_t *x, vb y) { _mm256_storeu_si256((__m256i *)x, y); }
static inline vb vb_all(uint32_t x) { return _mm256_set1_epi32((int)x); }
static inline vb vb_max(vb x, vb y) { return _mm256_max_epu8(x, y); }
static inline vb vb_add_saturated(vb x, vb y) { return _mm256_adds_epu8(x, y); }

static inline vb vb_max_16(vb x, vb y) { return _mm256_max_epi16(x, y); }
static inline vb vb_add_16(vb x, vb y) { return _mm256_add_epi16(x, y); }

static inline vf vf_load(const float *x) { return _mm256_loadu_ps(x); }
static inline void vf_store(float *x, vf y) { _mm256_storeu_ps(x, y); }
static inline vf vf_all(float x) { return _mm256_set1_ps(x); }
static inline vf vf_mul(vf x, vf y) { return _mm256_mul_ps(x, y); }
static inline vf vf_bits(vi x) { return _mm256_castsi256_ps(x); }
static inline vf vf_and(vf x, uint32_t y) {
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32((int)y)));
}
static inline vi vi_bits(vf x) { return _mm256_castps_si256(x); }
static inline vf vf_from(vi x) { return _mm256_cvtepi32_ps(x); }

static inline __m128 half_from_both(__m128i x, __m128i y) {
    return _mm256_cvtpd_ps(_mm256_add_pd(_mm256_cvtepi32_pd(x), _mm256_cvtepi32_pd(y)));
}
static inline vf vf_from_both(vi x, vi y) {
    __m128 low = half_from_both(_mm256_castsi256_si128(x), _mm256_castsi256_si128(y));
    return _mm256_set_m128(half_from_both(_mm256_extracti128_si256(x, 1), _mm256_extracti128_si256(y, 1)), low);
}

static inline vi vi_all(int32_t x) { return _mm256_set1_epi32(x); }
static inline vi vi_add(vi x, vi y) { return _mm256_add_epi32(x, y); }
static inline vi vi_sub(vi x, vi y) { return _mm256_sub_epi32(x, y); }
static inline vi vi_max(vi x, vi y) { return _mm256_max_epi32(x, y); }
static inline vi vi_min(vi x, vi y) { return _mm256_min_epi32(x, y); }
static inline vi vi_shift_left_23(vi x) { return _mm256_slli_epi32(x, 23); }
static inline vi vi_from_bytes(const uint8_t *x) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x)); }
static inline vi vi_from_halves(const int16_t *x) {
    return _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)x));
}
static inline vi vi_exponent(vf x) {
    return _mm256_srli_epi32(_mm256_slli_epi32(_mm256_castps_si256(x), 1), 24);
}
static inline vi vi_cut(vf x) { return _mm256_cvttps_epi32(x); }

static inline vi vi_where_zero(vf x, vi y, vi z) {
    __m256 is_zero = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_EQ_OQ);
    return _mm256_blendv_epi8(z, y, _mm256_castps_si256(is_zero));
}

static inline v_mask v_no_mask(void) { return _mm256_setzero_si256(); }
static inline v_mask v_or_above(v_mask mask, vi x, int32_t limit) {
    return _mm256_or_si256(mask, _mm256_cmpgt_epi32(x, _mm256_set1_epi32(limit - 1)));
}
static inline int v_any(v_mask mask) { return !_mm256_testz_si256(mask, mask); }

static inline vi v_add_cut(vi sum, vf a, vf b, vf unit, const char *signs) {
    vi word = _mm256_castps_si256(_mm256_fmadd_ps(a, b, unit));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(word, _mm256_loadu_si256((const __m256i *)signs)));
}
static inline void v_toward_zero(void) { _mm_setcsr(0x7F80); }
static inline void v_to_nearest(void) { _mm_setcsr(0x1F80); }

static int runs_here(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#include "kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
