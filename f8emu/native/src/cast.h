/* The loops of a cast, which a compiler turns into vectors of the width that includes them. */
#include "width.h"

/* All ones or none. A compiler makes branches of `condition ? x : y`, and no vectors of a loop with branches. */
static inline uint32_t mask(int condition) { return -(uint32_t)condition; }

static inline float from_bfloat16(uint16_t x) { return f8_float((uint32_t)x << 16); }

/* Exponents of float16 begin 112 below those of float32; its infinity and NaN keep all ones. */
static inline float from_float16(uint16_t x) {
    uint32_t magnitude = (uint32_t)(x & 0x7FFF) << 13, sign = (uint32_t)(x & 0x8000) << 16;
    uint32_t finite = f8_bits(f8_float(magnitude) * 0x1p112f), is_finite = mask(magnitude < 0x0F800000);
    return f8_float((finite & is_finite) | ((magnitude | 0x7F800000) & ~is_finite) | sign);
}

static inline float from_float32(float x) { return x; }

/* Round to nearest even at `fraction` bits, saturate; NaN is the format's. `fraction` is a constant where inlined. */
static inline uint8_t code_of(float x, const f8_target *target, int fraction) {
    int shift = 23 - fraction;
    uint32_t bits = f8_bits(x), magnitude = bits & 0x7FFFFFFF;
    uint32_t m = magnitude < target->max_bits ? magnitude : target->max_bits;
    uint32_t normal = ((m + (1u << (shift - 1)) - 1 + (m >> shift & 1)) >> shift) - target->exponent_offset;
    /* Of a subnormal the float32 sum has the last place where the format has it. */
    uint32_t subnormal = f8_bits(f8_float(m) + target->subnormal) - f8_bits(target->subnormal);
    uint32_t is_subnormal = mask(m < target->min_normal_bits);
    uint32_t code = (subnormal & is_subnormal) | (normal & ~is_subnormal);
    uint32_t is_zero = mask(code == 0), is_nan = mask(magnitude > 0x7F800000);
    code |= bits >> 24 & 0x80 & (target->zero_sign | ~is_zero);
    return (uint8_t)((code & ~is_nan) | (target->nan_code & is_nan));
}

#define ENCODE(type, from, fraction)                                                                     \
    {                                                                                                    \
        const type *values = x;                                                                          \
        const f8_target of = *target; /* which the codes cannot alias */                                 \
        if (each)                                                                                        \
            for (int64_t i = 0; i < count; i++) codes[i] = code_of(from(values[i]) * factor[i], &of, fraction); \
        else                                                                                             \
            for (int64_t i = 0; i < count; i++) codes[i] = code_of(from(values[i]) * *factor, &of, fraction);   \
        return;                                                                                          \
    }

/* codes[i] = cast(x[i] * factor), by a factor each or one for all. */
static void encode(const void *restrict x, int format, int64_t count, const float *restrict factor, int each,
                   const f8_target *restrict target, uint8_t *restrict codes) {
    if (target->fraction_bits == 3) {
        if (format == F8_BFLOAT16) ENCODE(uint16_t, from_bfloat16, 3)
        if (format == F8_FLOAT16) ENCODE(uint16_t, from_float16, 3)
        ENCODE(float, from_float32, 3)
    }
    if (format == F8_BFLOAT16) ENCODE(uint16_t, from_bfloat16, 2)
    if (format == F8_FLOAT16) ENCODE(uint16_t, from_float16, 2)
    ENCODE(float, from_float32, 2)
}

/* The largest magnitude, in bits of `format`: as integers, NaN is above infinity. */
static uint32_t largest(const void *restrict x, int format, int64_t count) {
    if (format == F8_FLOAT32) {
        const uint32_t *values = x;
        uint32_t found = 0;
        for (int64_t i = 0; i < count; i++) {
            uint32_t magnitude = values[i] & 0x7FFFFFFF;
            found = magnitude > found ? magnitude : found;
        }
        return found;
    }
    const uint16_t *values = x;
    uint16_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t magnitude = values[i] & 0x7FFF;
        found = magnitude > found ? magnitude : found;
    }
    return found;
}

/* found[i] = the larger of itself and the magnitude of x[i]. */
static void enlarge(const void *restrict x, int format, int64_t count, uint32_t *restrict found) {
    const uint32_t *singles = x;
    const uint16_t *halves = x;
    if (format == F8_FLOAT32)
        for (int64_t i = 0; i < count; i++) {
            uint32_t magnitude = singles[i] & 0x7FFFFFFF;
            found[i] = magnitude > found[i] ? magnitude : found[i];
        }
    else
        for (int64_t i = 0; i < count; i++) {
            uint32_t magnitude = halves[i] & 0x7FFF;
            found[i] = magnitude > found[i] ? magnitude : found[i];
        }
}
