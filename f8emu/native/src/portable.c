/* Vectors of plain C, which a compiler may make of what it likes. */
#include <stdint.h>

#define NAME f8_portable
#define NAME_TEXT "portable"
#define LANES 8
#define COLUMNS 16
#define TOGETHER 1
#define MAGNITUDES 0

typedef struct { float x[LANES]; } vf;
typedef struct { int32_t x[LANES]; } vi;
typedef struct { uint8_t x[COLUMNS]; } vb;
typedef int v_mask;
#define EACH(count) for (int i = 0; i < (count); i++)

static inline vb vb_load(const uint8_t *x) { vb z; EACH(COLUMNS) z.x[i] = x[i]; return z; }
static inline void vb_store(uint8_t *x, vb y) { EACH(COLUMNS) x[i] = y.x[i]; }
static inline vb vb_all(uint32_t x) { vb z; EACH(COLUMNS / 4) __builtin_memcpy(z.x + 4 * i, &x, 4); return z; }
static inline vb vb_max(vb x, vb y) { EACH(COLUMNS) x.x[i] = x.x[i] > y.x[i] ? x.x[i] : y.x[i]; return x; }
static inline vb vb_add_saturated(vb x, vb y) {
    EACH(COLUMNS) { int sum = x.x[i] + y.x[i]; x.x[i] = (uint8_t)(sum > 255 ? 255 : sum); }
    return x;
}

static inline vb vb_max_16(vb x, vb y) {
    int16_t a[COLUMNS / 2], b[COLUMNS / 2];
    __builtin_memcpy(a, &x, sizeof x);
    __builtin_memcpy(b, &y, sizeof y);
    EACH(COLUMNS / 2) a[i] = a[i] > b[i] ? a[i] : b[i];
    __builtin_memcpy(&x, a, sizeof x);
    return x;
}
static inline vb vb_add_16(vb x, vb y) {
    uint16_t a[COLUMNS / 2], b[COLUMNS / 2];
    __builtin_memcpy(a, &x, sizeof x);
    __builtin_memcpy(b, &y, sizeof y);
    EACH(COLUMNS / 2) a[i] = (uint16_t)(a[i] + b[i]);
    __builtin_memcpy(&x, a, sizeof x);
    return x;
}

static inline vf vf_load(const float *x) { vf z; EACH(LANES) z.x[i] = x[i]; return z; }
static inline void vf_store(float *x, vf y) { EACH(LANES) x[i] = y.x[i]; }
static inline vf vf_all(float x) { vf z; EACH(LANES) z.x[i] = x; return z; }
static inline vf vf_mul(vf x, vf y) { EACH(LANES) x.x[i] *= y.x[i]; return x; }
static inline vf vf_bits(vi x) { vf z; __builtin_memcpy(&z, &x, sizeof z); return z; }
static inline vf vf_and(vf x, uint32_t y) {
    EACH(LANES) { uint32_t bits; __builtin_memcpy(&bits, &x.x[i], 4); bits &= y; __builtin_memcpy(&x.x[i], &bits, 4); }
    return x;
}
static inline vi vi_bits(vf x) { vi z; __builtin_memcpy(&z, &x, sizeof z); return z; }
static inline vf vf_from(vi x) { vf z; EACH(LANES) z.x[i] = (float)x.x[i]; return z; }

static inline vf vf_from_both(vi x, vi y) {
    vf z;
    EACH(LANES) {
        double sum = (double)x.x[i] + (double)y.x[i];
        uint64_t bits;
        __builtin_memcpy(&bits, &sum, 8);
        bits &= 0xFFFFFFFFE0000000;
        __builtin_memcpy(&sum, &bits, 8);
        z.x[i] = (float)sum;
    }
    return z;
}

static inline vi vi_all(int32_t x) { vi z; EACH(LANES) z.x[i] = x; return z; }
static inline vi vi_add(vi x, vi y) { EACH(LANES) x.x[i] = (int32_t)((uint32_t)x.x[i] + (uint32_t)y.x[i]); return x; }
static inline vi vi_sub(vi x, vi y) { EACH(LANES) x.x[i] = (int32_t)((uint32_t)x.x[i] - (uint32_t)y.x[i]); return x; }
static inline vi vi_max(vi x, vi y) { EACH(LANES) x.x[i] = x.x[i] > y.x[i] ? x.x[i] : y.x[i]; return x; }
static inline vi vi_min(vi x, vi y) { EACH(LANES) x.x[i] = x.x[i] < y.x[i] ? x.x[i] : y.x[i]; return x; }
static inline vi vi_shift_left_23(vi x) { EACH(LANES) x.x[i] = (int32_t)((uint32_t)x.x[i] << 23); return x; }
static inline vi vi_from_bytes(const uint8_t *x) { vi z; EACH(LANES) z.x[i] = x[i]; return z; }
static inline vi vi_from_halves(const int16_t *x) { vi z; EACH(LANES) z.x[i] = x[i]; return z; }
static inline vi vi_exponent(vf x) {
    vi z;
    __builtin_memcpy(&z, &x, sizeof z);
    EACH(LANES) z.x[i] = (int32_t)((uint32_t)z.x[i] >> 23 & 0xFF);
    return z;
}
/* What no integer holds is outside what C defines; its output is not used. */
static inline vi vi_cut(vf x) {
    vi z;
    EACH(LANES) z.x[i] = (int32_t)(x.x[i] > -0x1p31f && x.x[i] < 0x1p31f ? x.x[i] : 0);
    return z;
}

static inline vi vi_where_zero(vf x, vi y, vi z) { EACH(LANES) z.x[i] = x.x[i] == 0 ? y.x[i] : z.x[i]; return z; }

static inline v_mask v_no_mask(void) { return 0; }
static inline v_mask v_or_above(v_mask mask, vi x, int32_t limit) { EACH(LANES) mask |= x.x[i] >= limit; return mask; }
static inline int v_any(v_mask mask) { return mask; }

static inline vi v_add_cut(vi sum, vf a, vf b, vf to_units, const char *signs) {
    (void)signs;
    return vi_add(sum, vi_cut(vf_mul(vf_mul(a, b), to_units)));
}
static inline void v_toward_zero(void) {}
static inline void v_to_nearest(void) {}

static int runs_here(void) { return 1; }

#include "kernel.h"
