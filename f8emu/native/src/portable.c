/* 128-bit vectors as gcc and clang have them on every machine: SSE2 on x86-64, NEON on aarch64. */
#include <stdint.h>

#define NAME f8_portable
#if defined(__aarch64__)
#define NAME_TEXT "NEON"
#else
#define NAME_TEXT "portable"
#endif
#define LANES 4
#define COLUMNS 16
#define TOGETHER 1
#define MAGNITUDES 0

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));
typedef uint8_t vb __attribute__((vector_size(16)));
typedef int16_t vb_halves __attribute__((vector_size(16)));
typedef vi v_mask;

/* Comparisons give all ones or zeros. */
#define EACH(count) for (int i = 0; i < (count); i++)
#define SELECT(mask, x, y) (((mask) & (x)) | (~(mask) & (y)))

static inline vb vb_load(const uint8_t *x) { vb z; __builtin_memcpy(&z, x, sizeof z); return z; }
static inline void vb_store(uint8_t *x, vb y) { __builtin_memcpy(x, &y, sizeof y); }
static inline vb vb_all(uint32_t x) { return (vb)((vi){0} + (int32_t)x); }
static inline vb vb_max(vb x, vb y) { EACH(16) x[i] = x[i] > y[i] ? x[i] : y[i]; return x; }
static inline vb vb_min(vb x, vb y) { EACH(16) x[i] = x[i] < y[i] ? x[i] : y[i]; return x; }
static inline vb vb_add_saturated(vb x, vb y) { return vb_min(x, ~y) + y; }
static inline vb vb_max_16(vb x, vb y) { vb larger = (vb)((vb_halves)x > (vb_halves)y); return SELECT(larger, x, y); }
static inline vb vb_add_16(vb x, vb y) { return (vb)((vb_halves)x + (vb_halves)y); }

static inline vf vf_load(const float *x) { vf z; __builtin_memcpy(&z, x, sizeof z); return z; }
static inline void vf_store(float *x, vf y) { __builtin_memcpy(x, &y, sizeof y); }
static inline vf vf_all(float x) { return (vf){x, x, x, x}; }
static inline vf vf_mul(vf x, vf y) { return x * y; }
static inline vf vf_bits(vi x) { return (vf)x; }
static inline vi vi_bits(vf x) { return (vi)x; }
static inline vf vf_and(vf x, uint32_t y) { return (vf)((vi)x & (int32_t)y); }
static inline vf vf_from(vi x) { return __builtin_convertvector(x, vf); }
static inline vf vf_from_both(vi x, vi y) {
    typedef double vd __attribute__((vector_size(32)));
    typedef int64_t vl __attribute__((vector_size(32)));
    vd sum = __builtin_convertvector(x, vd) + __builtin_convertvector(y, vd);
    return __builtin_convertvector((vd)((vl)sum & ~0x1FFFFFFFLL), vf);
}

static inline vi vi_all(int32_t x) { return (vi){x, x, x, x}; }
static inline vi vi_add(vi x, vi y) { return (vi)((vu)x + (vu)y); }
static inline vi vi_sub(vi x, vi y) { return (vi)((vu)x - (vu)y); }
static inline vi vi_max(vi x, vi y) { vi larger = x > y; return SELECT(larger, x, y); }
static inline vi vi_min(vi x, vi y) { vi smaller = x < y; return SELECT(smaller, x, y); }
static inline vi vi_shift_left_23(vi x) { return (vi)((vu)x << 23); }
static inline vi vi_from_bytes(const uint8_t *x) { return (vi){x[0], x[1], x[2], x[3]}; }
static inline vi vi_from_halves(const int16_t *x) { return (vi){x[0], x[1], x[2], x[3]}; }
static inline vi vi_exponent(vf x) { return (vi)x >> 23 & 0xFF; }
/* What no integer holds is outside what C defines; its output is not used. */
static inline vi vi_cut(vf x) { return __builtin_convertvector(x, vi); }
static inline vi vi_where_zero(vf x, vi y, vi z) { vi is_zero = x == 0; return SELECT(is_zero, y, z); }

static inline v_mask v_no_mask(void) { return (vi){0}; }
static inline v_mask v_or_above(v_mask mask, vi x, int32_t limit) { return mask | (x >= limit); }
static inline int v_any(v_mask mask) { return (mask[0] | mask[1] | mask[2] | mask[3]) != 0; }

static inline vi v_add_cut(vi sum, vf a, vf b, vf to_units, const char *signs) {
    (void)signs;
    return vi_add(sum, vi_cut(a * b * to_units));
}
static inline void v_toward_zero(void) {}
static inline void v_to_nearest(void) {}

static int runs_here(void) { return 1; }

#include "kernel.h"
