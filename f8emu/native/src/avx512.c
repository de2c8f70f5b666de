/* 512-bit vectors: AVX-512 F, BW, DQ, VL and VNNI (Ice Lake, Zen 4 and newer). The instruction names its rounding. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,prefer-vector-width=512")
#endif
#include <immintrin.h>
#include <stdint.h>

#define NAME f8_avx512
#define NAME_TEXT "AVX-512"
#define LANES 16
#define COLUMNS 64
#define TOGETHER 2
#define MAGNITUDES 1

typedef __m512 vf;
typedef __m512i vi, vb;
typedef __mmask16 v_mask;

static inline vb vb_load(const uint8_t *x) { return _mm512_loadu_si512(x); }
static inline void vb_store(uint8_t *x, vb y) { _mm512_store_si512(x, y); }
static inline vb vb_all(uint32_t x) { return _mm512_set1_epi32((int)x); }
static inline vb vb_max(vb x, vb y) { return _mm512_max_epu8(x, y); }
static inline vb vb_add_saturated(vb x, vb y) { return _mm512_adds_epu8(x, y); }

static inline vb vb_max_16(vb x, vb y) { return _mm512_max_epi16(x, y); }
static inline vb vb_add_16(vb x, vb y) { return _mm512_add_epi16(x, y); }

static inline vf vf_load(const float *x) { return _mm512_loadu_ps(x); }
static inline void vf_store(float *x, vf y) { _mm512_storeu_ps(x, y); }
static inline vf vf_all(float x) { return _mm512_set1_ps(x); }
static inline vf vf_mul(vf x, vf y) { return _mm512_mul_ps(x, y); }
static inline vf vf_bits(vi x) { return _mm512_castsi512_ps(x); }
static inline vf vf_and(vf x, uint32_t y) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)y)));
}
static inline vi vi_bits(vf x) { return _mm512_castps_si512(x); }
static inline vf vf_from(vi x) { return _mm512_cvtepi32_ps(x); }

static inline __m256 half_from_both(__m256i x, __m256i y) {
    return _mm512_cvt_roundpd_ps(_mm512_add_pd(_mm512_cvtepi32_pd(x), _mm512_cvtepi32_pd(y)),
                                 _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
static inline vf vf_from_both(vi x, vi y) {
    __m256 low = half_from_both(_mm512_castsi512_si256(x), _mm512_castsi512_si256(y));
    __m256 high = half_from_both(_mm512_extracti64x4_epi64(x, 1), _mm512_extracti64x4_epi64(y, 1));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

static inline vi vi_all(int32_t x) { return _mm512_set1_epi32(x); }
static inline vi vi_add(vi x, vi y) { return _mm512_add_epi32(x, y); }
static inline vi vi_sub(vi x, vi y) { return _mm512_sub_epi32(x, y); }
static inline vi vi_max(vi x, vi y) { return _mm512_max_epi32(x, y); }
static inline vi vi_min(vi x, vi y) { return _mm512_min_epi32(x, y); }
static inline vi vi_shift_left_23(vi x) { return _mm512_slli_epi32(x, 23); }
static inline vi vi_from_bytes(const uint8_t *x) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x)); }
static inline vi vi_from_halves(const int16_t *x) {
    return _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)x));
}
static inline vi vi_exponent(vf x) {
    return _mm512_srli_epi32(_mm512_slli_epi32(_mm512_castps_si512(x), 1), 24);
}
static inline vi vi_cut(vf x) { return _mm512_cvttps_epi32(x); }

static inline vi vi_where_zero(vf x, vi y, vi z) {
    return _mm512_mask_mov_epi32(z, _mm512_cmpeq_ps_mask(x, _mm512_setzero_ps()), y);
}

static inline v_mask v_no_mask(void) { return 0; }
static inline v_mask v_or_above(v_mask mask, vi x, int32_t limit) {
    return (v_mask)(mask | _mm512_cmpge_epi32_mask(x, _mm512_set1_epi32(limit)));
}
static inline int v_any(v_mask mask) { return mask != 0; }

static inline vi v_add_cut(vi sum, vf a, vf b, vf unit, const char *signs) {
    vi word = _mm512_castps_si512(_mm512_fmadd_round_ps(a, b, unit, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC));
    return _mm512_dpwssd_epi32(sum, word, _mm512_loadu_si512(signs));
}
static inline void v_toward_zero(void) {}
static inline void v_to_nearest(void) {}

static int runs_here(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

#include "kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
