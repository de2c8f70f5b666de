/* A width: the packing of operands, the steps of the tensor core and the promotion, on the vectors of the file that
   includes this one. It defines, for LANES float32:

     NAME, COLUMNS               of the width, and of a tile of outputs: the bytes of a vector, a multiple of LANES
     MAGNITUDES                  1: `v_add_cut` multiplies magnitudes toward zero, and takes signs
     vf, vi, vb                  vectors of float32, of int32, of COLUMNS bytes
     v_*                         the operations below

   [ACC-3] A term is cut in one of two ways, which give the same bits:

   - With magnitudes: fma(|a|, |b|, M), rounded toward zero, where M = 2^23 units. The product is below 2^15 units, so
     the sum stays in M's binade, whose last place is one unit: the low bits of the word are the cut product. A dot
     product of 16-bit words adds them with the sign, and multiplies the high half, which is M's, by 0.
   - Without: a * b is exact in float32, so is its multiple by 1/unit, a power of two; the conversion to an integer cuts.

   [ACC-4] Sums are integers, exact: 32 terms below 2^15 and the accumulator (narrow), 16 terms below 2^27 (wide). */
#include <math.h>
#include <string.h>

#include "cast.h"
#include "width.h"

enum {
    BIAS = 127,
    /* Narrow exponents are bytes: the biased exponent of the product is the sum of both. A zero has 0: its sums are below
       those of all products, and of all accumulators, that are not 0. What is no number has 255, and so have its sums. */
    BIAS_A = 63,
    BIAS_B = 64,
    NO_NUMBER = 255,
    LARGEST_NARROW = 230, /* the largest exponent of a step of numbers is below */
    SMALLEST_NARROW = 64, /* and that of a step of numbers that are not all 0 is above, since units are 2^-45 or more */
    /* Wide exponents are half-words, not biased. A zero's sums are far below those of numbers, those of what is no number
       far above, also with a zero; none leaves a half-word. */
    ZERO_WIDE = -8192,
    NO_NUMBER_WIDE = 12288,
    /* The largest exponents of which units, products and sums are normal float32 numbers. */
    SMALLEST_WIDE = -90,
    LARGEST_WIDE = 100,
};

/* ---- Packing ---- */

typedef struct {
    int shift, first_special, special_is_infinite, fraction_bits, exponent_offset;
    float factor;
} fields;

/* A float8 magnitude, shifted to where float32 has its fields, is the value divided by `factor`. */
static fields fields_of(int format, int bias) {
    fields e4m3 = {20, 0x7F, 0, 3, bias - 7, 0x1p120f}, e5m2 = {21, 0x7C, 1, 2, bias - 15, 0x1p112f};
    return format == F8_E5M2 ? e5m2 : e4m3;
}

/* Magnitudes, biased exponents and signs (1: negative) of `count` codes. */
static inline void decode_narrow(fields f, const uint8_t *codes, int count, float *value, uint8_t *exponent,
                                 uint8_t *negative) {
    uint32_t bits[COLUMNS > F8_GROUP ? COLUMNS : F8_GROUP];
    int specials = 0;
    for (int j = 0; j < count; j++) bits[j] = (uint32_t)(codes[j] & 0x7F) << f.shift;
    memcpy(value, bits, sizeof(float) * count);
    for (int j = 0; j < count; j++) value[j] *= f.factor;
    for (int j = 0; j < count; j++) {
        uint8_t magnitude = codes[j] & 0x7F, field = magnitude >> f.fraction_bits;
        field = field < 1 ? 1 : field;
        uint8_t special = magnitude >= f.first_special;
        exponent[j] = magnitude == 0 ? 0 : special ? NO_NUMBER : (uint8_t)(field + f.exponent_offset);
        negative[j] = codes[j] >> 7;
        specials |= special;
    }
    if (specials)
        for (int j = 0; j < count; j++)
            if ((codes[j] & 0x7F) >= f.first_special)
                value[j] = f.special_is_infinite && (codes[j] & 0x7F) == f.first_special ? INFINITY : NAN;
}

static uint16_t wide_exponent(int exponent, float value) {
    return (uint16_t)(int16_t)(exponent != F8_ABSENT ? exponent : value == 0 ? ZERO_WIDE : NO_NUMBER_WIDE);
}

static uint32_t code_at(const f8_operand *x, int64_t row, int64_t k) {
    int64_t at = row * x->row_stride + k * x->k_stride;
    return x->format >= F8_BFLOAT16 ? ((const uint16_t *)x->codes)[at] : ((const uint8_t *)x->codes)[at];
}

/* The value and the wide exponent at place k of the order in which K is consumed [CHIP-2]; of a zero from `end` on. */
static uint16_t decode_wide(const f8_operand *x, const f8_model *model, int64_t row, int64_t k, int64_t end,
                            float *value) {
    int exponent = F8_ABSENT;
    *value = 0;
    if (model->order_length) k += model->order[k % model->order_length] - k % model->order_length;
    if (k < end) f8_decode(code_at(x, row, k), x->format, model->converts, value, &exponent);
    return wide_exponent(exponent, *value);
}

static void pack_a(const f8_operand *a, const f8_model *model, f8_kind kind, int64_t first, int64_t rows, int64_t k,
                   int64_t count, int64_t padded, f8_group *panel) {
    fields f = fields_of(a->format, BIAS_A);
    for (int64_t row = 0; row < rows + (F8_ROWS - rows % F8_ROWS) % F8_ROWS; row++) {
        for (int64_t g = 0; g < padded / F8_GROUP; g++) {
            f8_group *group = panel + (row / F8_ROWS) * (padded / F8_GROUP) + g;
            int r = (int)(row % F8_ROWS);
            int64_t inside = row < rows ? count - g * F8_GROUP : 0;
            inside = inside < 0 ? 0 : inside > F8_GROUP ? F8_GROUP : inside;
            if (kind == F8_NARROW) {
                uint8_t codes[F8_GROUP] = {0}, exponent[F8_GROUP], negative[F8_GROUP];
                const uint8_t *from = (const uint8_t *)a->codes + (first + row) * a->row_stride +
                                      (k + g * F8_GROUP) * a->k_stride;
                if (a->k_stride == 1 && inside == F8_GROUP)
                    memcpy(codes, from, F8_GROUP);
                else
                    for (int64_t j = 0; j < inside; j++) codes[j] = from[j * a->k_stride];
                decode_narrow(f, codes, F8_GROUP, group->value[r], exponent, negative);
                for (int j = 0; j < F8_GROUP; j++) {
                    group->exponent[r][j] = exponent[j] * 0x01010101u;
                    group->sign[r][j] = negative[j] * (uint32_t)(COLUMNS * sizeof(int32_t));
                }
                if (!MAGNITUDES)
                    for (int j = 0; j < F8_GROUP; j++)
                        group->value[r][j] = negative[j] ? -group->value[r][j] : group->value[r][j];
            } else {
                int64_t end = row < rows ? k + count : 0;
                for (int j = 0; j < F8_GROUP; j++)
                    group->exponent[r][j] = 0x00010001u * decode_wide(a, model, first + row, k + g * F8_GROUP + j, end,
                                                                      &group->value[r][j]);
            }
        }
    }
}

/* 8 by 8 bytes, as eight words: x[i] byte j becomes x[j] byte i. */
static inline void transpose_8x8(uint64_t *x) {
    for (int distance = 4; distance; distance >>= 1) {
        int shift = 8 * distance;
        uint64_t mask = distance == 4 ? 0x00000000FFFFFFFF : distance == 2 ? 0x0000FFFF0000FFFF : 0x00FF00FF00FF00FF;
        for (int i = 0; i < 8; i++)
            if (!(i & distance)) {
                uint64_t swapped = ((x[i] >> shift) ^ x[i + distance]) & mask;
                x[i] ^= swapped << shift;
                x[i + distance] ^= swapped;
            }
    }
}

/* codes[j][column]: bytes of 8 of K from k, zero where there are none. */
static void eight_of_k(const f8_operand *b, int64_t first, int64_t columns, int64_t k, int64_t count,
                       uint8_t codes[8][COLUMNS]) {
    const uint8_t *from = (const uint8_t *)b->codes + first * b->row_stride + k * b->k_stride;
    int64_t column = 0;
    if (b->k_stride == 1 && count >= 8)
        for (; column + 8 <= columns; column += 8) {
            uint64_t x[8];
            for (int i = 0; i < 8; i++) memcpy(&x[i], from + (column + i) * b->row_stride, 8);
            transpose_8x8(x); /* on a machine whose bytes come the other way round this would be the other diagonal */
            for (int i = 0; i < 8; i++) memcpy(&codes[i][column], &x[i], 8);
        }
    for (int64_t j = 0; j < 8; j++) {
        if (b->row_stride == 1 && j < count && !column)
            memcpy(codes[j], from + j * b->k_stride, columns);
        else
            for (int64_t i = column; i < columns; i++)
                codes[j][i] = j < count ? from[i * b->row_stride + j * b->k_stride] : 0;
        memset(codes[j] + columns, 0, COLUMNS - columns);
    }
}

static void pack_b(const f8_operand *b, const f8_model *model, f8_kind kind, int64_t first, int64_t columns, int64_t k,
                   int64_t count, int64_t padded, f8_columns panel) {
    if (kind == F8_NARROW) {
        fields f = fields_of(b->format, BIAS_B);
        for (int64_t part = 0; part < padded; part += 8) {
            uint8_t codes[8][COLUMNS];
            eight_of_k(b, first, columns, k + part, count - part, codes);
            for (int64_t j = 0; j < 8; j++) {
                uint8_t negative[COLUMNS];
                float *value = panel.value + (part + j) * COLUMNS;
                decode_narrow(f, codes[j], COLUMNS, value, panel.exponent + (part + j) * COLUMNS, negative);
                if (MAGNITUDES) {
                    int32_t *sign = panel.sign + (part + j) * 2 * COLUMNS;
                    /* 1 or -1 in the low half of the word, 0 in the high half */
                    for (int n = 0; n < COLUMNS; n++) sign[n] = negative[n] ? 0xFFFF : 1;
                    for (int n = 0; n < COLUMNS; n++) sign[COLUMNS + n] = negative[n] ? 1 : 0xFFFF;
                } else {
                    for (int n = 0; n < COLUMNS; n++) value[n] = negative[n] ? -value[n] : value[n];
                }
            }
        }
        return;
    }
    for (int64_t j = 0; j < padded; j++) {
        uint16_t *exponents = (uint16_t *)panel.exponent + j * COLUMNS;
        for (int64_t n = 0; n < COLUMNS; n++)
            exponents[n] = decode_wide(b, model, first + n, k + j, n < columns ? k + count : 0,
                                       &panel.value[j * COLUMNS + n]);
    }
}

/* ---- One step of one output, from the panels ---- */

/* The k-th value and exponent of row r of a row block, from its first group. */
static float value_a(const f8_group *a, int r, int k, int magnitudes) {
    const f8_group *group = a + k / F8_GROUP;
    float value = group->value[r][k % F8_GROUP];
    return magnitudes && group->sign[r][k % F8_GROUP] ? -value : value;
}

static __attribute__((noinline, cold)) float single(const f8_model *model, f8_kind kind, const f8_group *a, int r,
                                                    f8_columns b, int n, float accumulator) {
    float values_a[F8_LONGEST_STEP], values_b[F8_LONGEST_STEP];
    int32_t exponent[F8_LONGEST_STEP];
    int magnitudes = kind == F8_NARROW && MAGNITUDES;
    for (int k = 0; k < model->step_k; k++) {
        uint32_t e = a[k / F8_GROUP].exponent[r][k % F8_GROUP];
        values_a[k] = value_a(a, r, k, magnitudes);
        values_b[k] = b.value[k * COLUMNS + n];
        if (magnitudes && b.sign[k * 2 * COLUMNS + n] != 1) values_b[k] = -values_b[k];
        if (kind == F8_NARROW) {
            int of_a = (int)(e & 0xFF), of_b = b.exponent[k * COLUMNS + n];
            int is_number = of_a && of_b && of_a != NO_NUMBER && of_b != NO_NUMBER;
            exponent[k] = is_number ? of_a - BIAS_A + of_b - BIAS_B : F8_ABSENT;
        } else {
            int of_a = (int16_t)e, of_b = (int16_t)((uint16_t *)b.exponent)[k * COLUMNS + n];
            int is_number = of_a > ZERO_WIDE && of_b > ZERO_WIDE && of_a < NO_NUMBER_WIDE && of_b < NO_NUMBER_WIDE;
            exponent[k] = is_number ? of_a + of_b : F8_ABSENT;
        }
    }
    return f8_step(model, accumulator, values_a, values_b, exponent, model->step_k);
}

/* ---- Narrow steps ---- */

/* One step of four rows and all columns of a tile. `count` is a constant of 16 or 32 where this is inlined. */
static inline __attribute__((always_inline)) void narrow_step(const f8_model *model, const f8_group *a, f8_columns b,
                                                              float *accumulators, int count) {
    /* 1. [ACC-2] The largest exponent of the products: COLUMNS of them an instruction. */
    uint8_t largest[F8_ROWS][COLUMNS] __attribute__((aligned(64)));
    vb e_max[F8_ROWS];
    for (int r = 0; r < F8_ROWS; r++) e_max[r] = vb_all(SMALLEST_NARROW * 0x01010101u);
    for (int k = 0; k < count; k++) {
        vb e = vb_load(b.exponent + k * COLUMNS);
        for (int r = 0; r < F8_ROWS; r++)
            e_max[r] = vb_max(e_max[r], vb_add_saturated(e, vb_all(a[k / F8_GROUP].exponent[r][k % F8_GROUP])));
    }
    for (int r = 0; r < F8_ROWS; r++) vb_store(largest[r], e_max[r]);

    for (int part = 0; part < COLUMNS; part += TOGETHER * LANES) {
        vi sum[F8_ROWS][TOGETHER];
        vf unit[F8_ROWS][TOGETHER]; /* M with magnitudes, otherwise 1 / unit */
        vf scale[F8_ROWS][TOGETHER];
        float before[F8_ROWS][TOGETHER * LANES];
        v_mask apart = v_no_mask();
        for (int r = 0; r < F8_ROWS; r++)
            for (int v = 0; v < TOGETHER; v++) {
                /* 2. The accumulator takes part; its term is cut like the others. */
                vf start = vf_load(accumulators + r * COLUMNS + part + v * LANES);
                vi e = vi_max(vi_from_bytes(largest[r] + part + v * LANES), vi_exponent(start));
                vi field = vi_shift_left_23(e);
                vf to_units = vf_bits(vi_sub(vi_all((int32_t)((2 * BIAS + 13u) << 23)), field));
                apart = v_or_above(apart, e, LARGEST_NARROW);
                sum[r][v] = vi_cut(vf_mul(start, to_units));
                unit[r][v] = MAGNITUDES ? vf_bits(vi_add(field, vi_all((23 - 13) << 23))) : to_units;
                scale[r][v] = vf_bits(vi_sub(field, vi_all(13 << 23)));
            }
        int is_apart = v_any(apart);
        if (is_apart)
            for (int r = 0; r < F8_ROWS; r++)
                memcpy(before[r], accumulators + r * COLUMNS + part, sizeof before[r]);
        /* 3. [ACC-3], [ACC-4] */
        #pragma GCC unroll 32
        for (int k = 0; k < count; k++) {
            const f8_group *group = a + k / F8_GROUP;
            vf of_b[TOGETHER];
            for (int v = 0; v < TOGETHER; v++) of_b[v] = vf_load(b.value + k * COLUMNS + part + v * LANES);
            for (int r = 0; r < F8_ROWS; r++) {
                vf of_a = vf_all(group->value[r][k % F8_GROUP]);
                const char *signs = (const char *)(b.sign + k * 2 * COLUMNS + part) + group->sign[r][k % F8_GROUP];
                for (int v = 0; v < TOGETHER; v++)
                    sum[r][v] = v_add_cut(sum[r][v], of_a, of_b[v], unit[r][v], signs + v * sizeof(vi));
            }
        }
        /* 4. [ACC-5] The sum is below 2^21: exact as float32. Its 14 leading bits are kept, and it is scaled. */
        for (int r = 0; r < F8_ROWS; r++)
            for (int v = 0; v < TOGETHER; v++)
                vf_store(accumulators + r * COLUMNS + part + v * LANES,
                         vf_mul(vf_and(vf_from(sum[r][v]), 0xFFFFFC00), scale[r][v]));
        /* 5. [SPEC-1] Outputs that have met what is no number. */
        if (is_apart)
            for (int r = 0; r < F8_ROWS; r++)
                for (int n = 0; n < TOGETHER * LANES; n++) {
                    uint32_t bits;
                    memcpy(&bits, &before[r][n], 4);
                    if (largest[r][part + n] >= LARGEST_NARROW || ((bits >> 23) & 0xFF) >= LARGEST_NARROW)
                        accumulators[r * COLUMNS + part + n] =
                            single(model, F8_NARROW, a, r, b, part + n, before[r][n]);
                }
    }
}

static __attribute__((noinline)) void narrow_steps(const f8_model *model, int64_t padded, const f8_group *a,
                                                   int64_t stride, f8_columns b, int64_t row_blocks,
                                                   float *accumulators) {
    for (int64_t k = 0; k < padded; k += model->step_k) {
        f8_columns step = {b.value + k * COLUMNS, b.sign + k * 2 * COLUMNS, b.exponent + k * COLUMNS};
        for (int64_t i = 0; i < row_blocks; i++) {
            const f8_group *groups = a + i * stride + k / F8_GROUP;
            float *of_block = accumulators + i * F8_ROWS * COLUMNS;
            if (model->step_k == 32)
                narrow_step(model, groups, step, of_block, 32);
            else
                narrow_step(model, groups, step, of_block, 16);
        }
    }
}

/* ---- Wide steps ---- */

/* Whether the vectors cannot compute an output whose largest exponent this is; zeros alone they can. */
static int is_beyond_wide(int32_t e) { return e > LARGEST_WIDE || (e < SMALLEST_WIDE && e > ZERO_WIDE / 2); }

/* One step of four rows and all columns of a tile. */
static void wide_step(const f8_model *model, const f8_group *a, f8_columns b, float *accumulators) {
    const int16_t *exponents = (const int16_t *)b.exponent;
    int count = model->step_k, bits = model->aligned_fraction_bits;
    int32_t sums[2][F8_ROWS][COLUMNS] __attribute__((aligned(64))); /* of the first and the second 16 of K */
    int32_t e_max[F8_ROWS][COLUMNS];
    /* 1. [ACC-2] The largest exponent. */
    {
        int16_t largest[F8_ROWS][COLUMNS];
        for (int r = 0; r < F8_ROWS; r++) {
            for (int n = 0; n < COLUMNS; n++) largest[r][n] = INT16_MIN;
            for (int k = 0; k < count; k++) {
                int16_t of_a = (int16_t)a[k / F8_GROUP].exponent[r][k % F8_GROUP];
                for (int n = 0; n < COLUMNS; n++) {
                    int16_t e = (int16_t)(of_a + exponents[k * COLUMNS + n]);
                    largest[r][n] = e > largest[r][n] ? e : largest[r][n];
                }
            }
            for (int n = 0; n < COLUMNS; n++) {
                uint32_t word;
                memcpy(&word, accumulators + r * COLUMNS + n, 4);
                int32_t field = (word >> 23) & 0xFF;
                int32_t e = word << 1 ? (field ? field : 1) - BIAS : ZERO_WIDE;
                e_max[r][n] = e > largest[r][n] ? e : largest[r][n];
            }
        }
    }
    /* 2. [ACC-3], [ACC-4] Where the unit is no normal number, the result is not used. */
    for (int part = 0; part < COLUMNS; part += TOGETHER * LANES)
        for (int first = 0; first < count; first += F8_GROUP) {
            vi sum[F8_ROWS][TOGETHER];
            vf to_units[F8_ROWS][TOGETHER];
            for (int r = 0; r < F8_ROWS; r++)
                for (int v = 0; v < TOGETHER; v++) {
                    vi e = vi_max(vi_load(e_max[r] + part + v * LANES), vi_all(SMALLEST_WIDE));
                    e = vi_min(e, vi_all(LARGEST_WIDE));
                    to_units[r][v] = vf_bits(vi_shift_left_23(vi_sub(vi_all(BIAS + bits), e)));
                    sum[r][v] = vi_all(0);
                }
            int end = first + F8_GROUP < count ? first + F8_GROUP : count;
            for (int k = first; k < end; k++)
                for (int r = 0; r < F8_ROWS; r++) {
                    vf of_a = vf_all(a[k / F8_GROUP].value[r][k % F8_GROUP]);
                    for (int v = 0; v < TOGETHER; v++) {
                        vf of_b = vf_load(b.value + k * COLUMNS + part + v * LANES);
                        sum[r][v] = vi_add(sum[r][v], vi_cut(vf_mul(vf_mul(of_a, of_b), to_units[r][v])));
                    }
                }
            for (int r = 0; r < F8_ROWS; r++)
                for (int v = 0; v < TOGETHER; v++) vi_store(sums[first / F8_GROUP][r] + part + v * LANES, sum[r][v]);
        }
    /* 3. [ACC-5] The sum, an integer below 2^33, is exact as float64; its 24 leading bits are kept. */
    for (int r = 0; r < F8_ROWS; r++) {
        float *start = accumulators + r * COLUMNS, result[COLUMNS];
        int32_t apart = 0;
        for (int n = 0; n < COLUMNS; n++) {
            int32_t e = e_max[r][n];
            apart |= is_beyond_wide(e);
            e = e < SMALLEST_WIDE ? SMALLEST_WIDE : e > LARGEST_WIDE ? LARGEST_WIDE : e;
            int32_t units_word = (BIAS + bits - e) << 23, scale_word = (BIAS - bits + e) << 23;
            float to_units, scale;
            memcpy(&to_units, &units_word, 4);
            memcpy(&scale, &scale_word, 4);
            double total = (double)sums[0][r][n] + (count > F8_GROUP ? (double)sums[1][r][n] : 0.0);
            /* Where the accumulator cannot be an integer of 32 bits, the result is not used. */
            float term = start[n] * to_units;
            total += (double)(int32_t)(fabsf(term) < 0x1p30f ? term : 0);
            uint64_t word;
            memcpy(&word, &total, 8);
            word &= 0xFFFFFFFFE0000000;
            memcpy(&total, &word, 8);
            result[n] = (float)total * scale;
        }
        if (apart)
            for (int n = 0; n < COLUMNS; n++)
                if (is_beyond_wide(e_max[r][n])) result[n] = single(model, F8_WIDE, a, r, b, n, start[n]);
        memcpy(start, result, sizeof result);
    }
}

static void wide_steps(const f8_model *model, f8_kind kind, int64_t padded, const f8_group *a, int64_t stride,
                       f8_columns b, int64_t row_blocks, float *accumulators) {
    /* A step of 8 lies in one half of a group. */
    for (int64_t k = 0; k < padded; k += model->step_k) {
        f8_columns step = {b.value + k * COLUMNS, b.sign, b.exponent + k * COLUMNS * sizeof(uint16_t)};
        for (int64_t i = 0; i < row_blocks; i++) {
            const f8_group *groups = a + i * stride + k / F8_GROUP;
            f8_group half;
            if (k % F8_GROUP) {
                half = *groups;
                for (int r = 0; r < F8_ROWS; r++) {
                    memmove(half.value[r], half.value[r] + k % F8_GROUP, sizeof half.value[r] / 2);
                    memmove(half.exponent[r], half.exponent[r] + k % F8_GROUP, sizeof half.exponent[r] / 2);
                }
                groups = &half;
            }
            float *of_block = accumulators + i * F8_ROWS * COLUMNS;
            if (kind == F8_WIDE)
                wide_step(model, groups, step, of_block);
            else
                for (int r = 0; r < F8_ROWS; r++)
                    for (int n = 0; n < COLUMNS; n++)
                        of_block[r * COLUMNS + n] = single(model, kind, groups, r, step, n, of_block[r * COLUMNS + n]);
        }
    }
}

static void steps(const f8_model *model, f8_kind kind, int64_t padded, const f8_group *a, int64_t stride, f8_columns b,
                  int64_t row_blocks, float *accumulators) {
    if (kind != F8_NARROW) {
        wide_steps(model, kind, padded, a, stride, b, row_blocks, accumulators);
        return;
    }
    v_toward_zero();
    narrow_steps(model, padded, a, stride, b, row_blocks, accumulators);
    v_to_nearest();
}

/* ---- Promotion ---- */

static void promote(const f8_factors *factors, int64_t rows, float *accumulators, float *totals) {
    int is_scaled = factors->scaling == F8_VECTORS || factors->scaling == F8_SQUARES;
    float of_b[COLUMNS] = {0};
    for (int64_t n = 0; is_scaled && n < factors->columns; n++)
        of_b[n] = factors->scale_b[(factors->b_offset + n) / factors->b_shared * factors->b_stride];
    for (int64_t row = 0; row < rows; row++) {
        float *partial = accumulators + row * COLUMNS, *total = totals + row * COLUMNS;
        float of_a = is_scaled ? factors->scale_a[(factors->a_offset + row) / factors->a_shared * factors->a_stride] : 1;
        if (factors->scaling == F8_VECTORS) /* [EPI-5] */
            for (int n = 0; n < COLUMNS; n++) total[n] = fmaf(partial[n] * of_a, of_b[n], total[n]);
        else if (factors->scaling == F8_SQUARES)
            for (int n = 0; n < COLUMNS; n++) total[n] = fmaf(partial[n], of_a * of_b[n], total[n]);
        else
            for (int n = 0; n < COLUMNS; n++) total[n] += partial[n]; /* [CHAIN-2] */
        memset(partial, 0, sizeof(float) * COLUMNS);
    }
}

const f8_width NAME = {NAME_TEXT, runs_here, COLUMNS, MAGNITUDES, pack_a, pack_b, steps, promote, largest, enlarge, encode};
