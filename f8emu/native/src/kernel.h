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
   - Without: a * b is exact in float32, and so is that times 1/unit, a power of two; the conversion to an integer cuts.

   [ACC-4] Sums are integers of 32 bits, exact. Narrow: 32 terms below 2^15, and the accumulator. Wide, of half a step:
   the accumulator, below 2^26, and 8 terms below 2^27, or 16 terms of float8, below 1.76 * 2^26. */
#include <math.h>
#include <string.h>

#include "cast.h"
#include "hash.h"
#include "width.h"

enum {
    BIAS = 127,
    /* Narrow exponents are bytes: the biased exponent of the product is the sum of both. A zero has 0: its sums are
       below those of all products, and of all accumulators, that are not 0. What is no number has 255, and so have its
       sums. */
    BIAS_A = 63,
    BIAS_B = 64,
    NO_NUMBER = 255,
    LARGEST_NARROW = 230, /* the largest exponent of a step of numbers is below */
    SMALLEST_NARROW = 64, /* and that of a step of numbers that are not all 0 is above, since units are 2^-45 or more */
    /* Wide exponents are half-words, not biased. A zero's sums are far below those of numbers, those of what is no
       number far above, also with a zero; none leaves a half-word. */
    ZERO_WIDE = -8192,
    NO_NUMBER_WIDE = 12288,
    /* The largest exponents of which units, products and sums are normal float32 numbers. */
    SMALLEST_WIDE = -90,
    LARGEST_WIDE = 100,
};

/* ---- Packing ---- */

/* A magnitude, shifted to where float32 has its fields, is the value divided by `factor`. */
typedef struct {
    int shift;
    float factor;
    uint32_t first_special; /* magnitudes from here on are no numbers */
} fields;

static fields fields_of(const f8_format *f) {
    float factor = f8_float((uint32_t)(2 * BIAS - f->bias) << 23);
    return (fields){23 - f->fraction_bits, factor, f->infinity ? f->infinity : f->nan};
}

/* Magnitudes, exponents biased by `bias`, and signs (1: negative) of `count` codes. */
static inline void decode_narrow(int format, int bias, const uint8_t *codes, int count, float *value,
                                 uint8_t *exponent, uint8_t *negative) {
    const f8_format *of = &f8_formats[format];
    fields f = fields_of(of);
    uint32_t bits[COLUMNS > F8_GROUP ? COLUMNS : F8_GROUP];
    uint8_t first_special = (uint8_t)f.first_special, offset = (uint8_t)(bias - of->bias), specials = 0;
    int fraction_bits = of->fraction_bits;
    for (int j = 0; j < count; j++) bits[j] = (uint32_t)(codes[j] & 0x7F) << f.shift;
    memcpy(value, bits, sizeof(float) * count);
    for (int j = 0; j < count; j++) value[j] *= f.factor;
    for (int j = 0; j < count; j++) {
        uint8_t magnitude = codes[j] & 0x7F, field = magnitude >> fraction_bits;
        field = field < 1 ? 1 : field;
        uint8_t special = magnitude >= first_special;
        exponent[j] = magnitude == 0 ? 0 : special ? NO_NUMBER : (uint8_t)(field + offset);
        negative[j] = codes[j] >> 7;
        specials |= special;
    }
    if (specials)
        for (int j = 0; j < count; j++)
            if ((codes[j] & 0x7F) >= first_special) value[j] = (codes[j] & 0x7F) == of->infinity ? INFINITY : NAN;
}

/* Values and wide exponents of `count` codes. */
static inline void decode_wide(int format, int converts, const uint16_t *codes, int count, float *value,
                               int16_t *exponent) {
    const f8_format *of = &f8_formats[format];
    fields f = fields_of(of);
    uint32_t bits[COLUMNS > F8_GROUP ? COLUMNS : F8_GROUP], sign = 1u << (of->bits - 1), specials = 0;
    /* A subnormal's is that of field 1; of a float8 that becomes a float16 [CHIP-1], float16's. */
    int32_t smallest = 1 - (converts ? 15 : of->bias);
    for (int j = 0; j < count; j++) bits[j] = (codes[j] & (sign - 1)) << f.shift;
    memcpy(value, bits, sizeof(float) * count);
    for (int j = 0; j < count; j++) value[j] *= f.factor;
    memcpy(bits, value, sizeof(float) * count);
    for (int j = 0; j < count; j++) {
        uint32_t magnitude = codes[j] & (sign - 1), special = (magnitude >= f.first_special) | (codes[j] == of->nan);
        int32_t e = (int32_t)(bits[j] >> 23) - BIAS;
        e = e < smallest ? smallest : e;
        exponent[j] = (int16_t)(special ? NO_NUMBER_WIDE : magnitude == 0 ? ZERO_WIDE : e);
        bits[j] |= (codes[j] & sign) << (32 - of->bits);
        specials |= special;
    }
    memcpy(value, bits, sizeof(float) * count);
    if (specials)
        for (int j = 0; j < count; j++) {
            int ignored;
            if (exponent[j] == NO_NUMBER_WIDE) f8_decode(codes[j], format, converts, &value[j], &ignored);
        }
}

/* codes[row * row_step + j * k_step]: 16 of K from k on, in the order in which K is consumed [CHIP-2]; 0 from `end`. */
static void gather_wide(const f8_operand *x, const f8_model *model, int64_t first, int64_t rows, int64_t k, int64_t end,
                        uint16_t *codes, int row_step, int k_step) {
    int64_t offset[F8_GROUP];
    int length = model->order_length, inside[F8_GROUP];
    for (int j = 0; j < F8_GROUP; j++) {
        int64_t at = length ? (k + j) / length * length + model->order[(k + j) % length] : k + j;
        inside[j] = at < end, offset[j] = inside[j] ? at * x->k_stride : 0;
    }
    for (int64_t row = 0; row < rows; row++) {
        int64_t start = (first + row) * x->row_stride;
        for (int j = 0; j < F8_GROUP; j++) {
            uint16_t code = x->format < F8_BFLOAT16 ? ((const uint8_t *)x->codes)[start + offset[j]]
                                                    : ((const uint16_t *)x->codes)[start + offset[j]];
            codes[row * row_step + j * k_step] = inside[j] ? code : 0;
        }
    }
}

static void pack_a(const f8_operand *a, const f8_model *model, f8_kind kind, int64_t first, int64_t rows, int64_t k,
                   int64_t count, int64_t padded, f8_group *panel) {
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
                decode_narrow(a->format, BIAS_A, codes, F8_GROUP, group->value[r], exponent, negative);
                for (int j = 0; j < F8_GROUP; j++) {
                    group->exponent[r][j] = exponent[j] * 0x01010101u;
                    group->sign[r][j] = negative[j] * (uint32_t)(COLUMNS * sizeof(int32_t));
                }
                if (!MAGNITUDES)
                    for (int j = 0; j < F8_GROUP; j++)
                        group->value[r][j] = negative[j] ? -group->value[r][j] : group->value[r][j];
            } else {
                uint16_t codes[F8_GROUP] = {0};
                int16_t exponent[F8_GROUP];
                if (row < rows) gather_wide(a, model, first + row, 1, k + g * F8_GROUP, k + count, codes, 0, 1);
                decode_wide(a->format, model->converts, codes, F8_GROUP, group->value[r], exponent);
                for (int j = 0; j < F8_GROUP; j++) group->exponent[r][j] = (uint16_t)exponent[j] * 0x00010001u;
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
        for (int64_t part = 0; part < padded; part += 8) {
            uint8_t codes[8][COLUMNS];
            eight_of_k(b, first, columns, k + part, count - part, codes);
            for (int64_t j = 0; j < 8; j++) {
                uint8_t negative[COLUMNS];
                float *value = panel.value + (part + j) * COLUMNS;
                uint8_t *exponent = panel.exponent + (part + j) * COLUMNS;
                decode_narrow(b->format, BIAS_B, codes[j], COLUMNS, value, exponent, negative);
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
    for (int64_t part = 0; part < padded; part += F8_GROUP) {
        uint16_t codes[F8_GROUP][COLUMNS] = {0};
        gather_wide(b, model, first, columns, k + part, k + count, codes[0], 1, COLUMNS);
        for (int64_t j = 0; j < F8_GROUP; j++)
            decode_wide(b->format, model->converts, codes[j], COLUMNS, panel.value + (part + j) * COLUMNS,
                        (int16_t *)panel.exponent + (part + j) * COLUMNS);
    }
}

/* ---- One step of one output, from the panels ---- */

/* The k-th value of row r of a row block, from its first group. */
static float value_a(const f8_group *a, int r, int k, int magnitudes) {
    const f8_group *group = a + k / F8_GROUP;
    float value = group->value[r][k % F8_GROUP];
    return magnitudes && group->sign[r][k % F8_GROUP] ? -value : value;
}

/* `from` is the place of the step in its first group of a. */
static __attribute__((noinline, cold)) float single(const f8_model *model, f8_kind kind, const f8_group *a, int from,
                                                    int r, f8_columns b, int n, float accumulator) {
    float values_a[F8_LONGEST_STEP], values_b[F8_LONGEST_STEP];
    int32_t exponent[F8_LONGEST_STEP];
    int magnitudes = kind == F8_NARROW && MAGNITUDES;
    int shift = b.shift ? a[from / F8_GROUP].shift[r] + b.shift[n] : 0;
    if (shift > F8_NO_SHIFT / 2) return f8_float(0x7FFFFFFF); /* [MX-2] */
    for (int k = 0; k < model->step_k; k++) {
        uint32_t e = a[(from + k) / F8_GROUP].exponent[r][(from + k) % F8_GROUP];
        values_a[k] = value_a(a, r, from + k, magnitudes);
        values_b[k] = b.value[k * COLUMNS + n];
        if (magnitudes && b.sign[k * 2 * COLUMNS + n] != 1) values_b[k] = -values_b[k];
        if (kind == F8_NARROW) {
            int of_a = (int)(e & 0xFF), of_b = b.exponent[k * COLUMNS + n];
            int is_number = of_a && of_b && of_a != NO_NUMBER && of_b != NO_NUMBER;
            exponent[k] = is_number ? of_a - BIAS_A + of_b - BIAS_B : F8_ABSENT;
        } else {
            int of_a = (int16_t)e, of_b = (int16_t)((uint16_t *)b.exponent)[k * COLUMNS + n];
            int is_number = of_a > ZERO_WIDE && of_b > ZERO_WIDE && of_a < NO_NUMBER_WIDE && of_b < NO_NUMBER_WIDE;
            exponent[k] = is_number ? of_a + of_b + shift : F8_ABSENT;
        }
    }
    return f8_step(model, accumulator, values_a, values_b, exponent, model->step_k, shift);
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
                for (int n = 0; n < TOGETHER * LANES; n++)
                    if (largest[r][part + n] >= LARGEST_NARROW ||
                        ((f8_bits(before[r][n]) >> 23) & 0xFF) >= LARGEST_NARROW)
                        accumulators[r * COLUMNS + part + n] =
                            single(model, F8_NARROW, a, 0, r, b, part + n, before[r][n]);
    }
}

static __attribute__((noinline)) void narrow_steps(const f8_model *model, f8_kind kind, int64_t padded,
                                                   const f8_group *a, int64_t stride, f8_columns b,
                                                   int64_t row_blocks, float *accumulators) {
    (void)kind;
    for (int64_t k = 0; k < padded; k += model->step_k) {
        f8_columns step = {b.value + k * COLUMNS, b.sign + k * 2 * COLUMNS, b.exponent + k * COLUMNS, NULL};
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

/* Whether the vectors cannot compute an output, from the largest exponent of its products and its accumulator; zeros
   alone they can. */
static int is_beyond_wide(int32_t e, float accumulator) {
    if (accumulator != 0) {
        int32_t of_accumulator = (int32_t)((f8_bits(accumulator) >> 23) & 0xFF) - BIAS;
        e = e > of_accumulator ? e : of_accumulator;
    }
    return e > LARGEST_WIDE || (e < SMALLEST_WIDE && e > ZERO_WIDE / 2);
}

/* One step of four rows and all columns of a tile, which starts at `from` of its first group. `count`, 8, 16 or 32, and
   `is_scaled` are constants where this is inlined.

   [MX-2] E8M0 scales are one power of two for all products of an output's step, 2^shift. The products are therefore
   cut without it, to units that are 2^shift smaller, and the integers are the same. [BF16-1], [MX-3] Among the
   outputs that the vectors compute, the exponent of zero is never the largest. */
static inline __attribute__((always_inline)) void wide_step(const f8_model *model, const f8_group *a, int from,
                                                            f8_columns b, float *accumulators, int count,
                                                            int is_scaled) {
    /* 1. [ACC-2] The largest exponent of the products: COLUMNS / 2 of them an instruction. */
    int16_t largest[F8_ROWS][COLUMNS] __attribute__((aligned(64)));
    for (int half = 0; half < 2; half++) {
        vb e_max[F8_ROWS];
        for (int r = 0; r < F8_ROWS; r++) e_max[r] = vb_all(0x80008000u);
        for (int k = 0; k < count; k++) {
            vb e = vb_load(b.exponent + (2 * k + half) * COLUMNS);
            for (int r = 0; r < F8_ROWS; r++) {
                uint32_t of_a = a[(from + k) / F8_GROUP].exponent[r][(from + k) % F8_GROUP];
                e_max[r] = vb_max_16(e_max[r], vb_add_16(e, vb_all(of_a)));
            }
        }
        for (int r = 0; r < F8_ROWS; r++) vb_store((uint8_t *)largest[r] + half * COLUMNS, e_max[r]);
    }

    int32_t bits = model->aligned_fraction_bits;
    for (int part = 0; part < COLUMNS; part += TOGETHER * LANES) {
        vi sum[2][F8_ROWS][TOGETHER]; /* of half a step each: below 2^31 */
        vf to_units[F8_ROWS][TOGETHER], of_products[F8_ROWS][TOGETHER];
        float before[F8_ROWS][TOGETHER * LANES];
        v_mask apart = v_no_mask();
        for (int r = 0; r < F8_ROWS; r++)
            for (int v = 0; v < TOGETHER; v++) {
                /* 2. The accumulator takes part; its term is cut like the others. */
                vf start = vf_load(accumulators + r * COLUMNS + part + v * LANES);
                vi e = vi_where_zero(start, vi_all(ZERO_WIDE), vi_sub(vi_exponent(start), vi_all(BIAS)));
                vi of_step = vi_from_halves(largest[r] + part + v * LANES), shift = vi_all(0);
                if (is_scaled) {
                    shift = vi_add(vi_all(a->shift[r]), vi_from_halves(b.shift + part + v * LANES));
                    of_step = vi_add(of_step, shift);
                }
                e = vi_max(e, of_step);
                vi normal = vi_max(e, vi_all(SMALLEST_WIDE));
                apart = v_or_above(apart, e, LARGEST_WIDE + 1);
                apart = v_or_above(apart, vi_min(vi_sub(normal, e), vi_sub(e, vi_all(ZERO_WIDE / 2))), 1);
                vi of_unit = vi_all(BIAS + bits), of_raw = normal;
                if (is_scaled) /* beyond these limits all products are 0, or cut to 0 */
                    of_raw = vi_min(vi_max(vi_sub(normal, shift), vi_all(SMALLEST_WIDE)), vi_all(LARGEST_WIDE));
                to_units[r][v] = vf_bits(vi_shift_left_23(vi_sub(of_unit, normal)));
                of_products[r][v] = vf_bits(vi_shift_left_23(vi_sub(of_unit, of_raw)));
                sum[0][r][v] = vi_cut(vf_mul(start, to_units[r][v]));
                sum[1][r][v] = vi_all(0);
            }
        int is_apart = v_any(apart);
        if (is_apart)
            for (int r = 0; r < F8_ROWS; r++)
                memcpy(before[r], accumulators + r * COLUMNS + part, sizeof before[r]);
        /* 3. [ACC-3], [ACC-4] */
        #pragma GCC unroll 32
        for (int k = 0; k < count; k++) {
            vf of_b[TOGETHER];
            for (int v = 0; v < TOGETHER; v++) of_b[v] = vf_load(b.value + k * COLUMNS + part + v * LANES);
            for (int r = 0; r < F8_ROWS; r++) {
                vf of_a = vf_all(a[(from + k) / F8_GROUP].value[r][(from + k) % F8_GROUP]);
                vi *of_half = sum[k >= count / 2][r];
                for (int v = 0; v < TOGETHER; v++)
                    of_half[v] = vi_add(of_half[v], vi_cut(vf_mul(vf_mul(of_a, of_b[v]), of_products[r][v])));
            }
        }
        /* 4. [ACC-5] The 24 leading bits of the sum, which has up to 33, and it is scaled. */
        for (int r = 0; r < F8_ROWS; r++)
            for (int v = 0; v < TOGETHER; v++) {
                vf unit = vf_bits(vi_sub(vi_all((int32_t)(2u * BIAS << 23)), vi_bits(to_units[r][v])));
                vf_store(accumulators + r * COLUMNS + part + v * LANES,
                         vf_mul(vf_from_both(sum[0][r][v], sum[1][r][v]), unit));
            }
        /* 5. Outputs whose unit, products or sum are no normal numbers, and [SPEC-1]. */
        if (is_apart)
            for (int r = 0; r < F8_ROWS; r++)
                for (int n = 0; n < TOGETHER * LANES; n++)
                    if (is_beyond_wide(largest[r][part + n] + (is_scaled ? a->shift[r] + b.shift[part + n] : 0),
                                       before[r][n]))
                        accumulators[r * COLUMNS + part + n] =
                            single(model, F8_WIDE, a, from, r, b, part + n, before[r][n]);
    }
}

static __attribute__((noinline)) void wide_steps(const f8_model *model, f8_kind kind, int64_t padded,
                                                 const f8_group *a, int64_t stride, f8_columns b, int64_t row_blocks,
                                                 float *accumulators) {
    for (int64_t k = 0; k < padded; k += model->step_k) {
        f8_columns step = {b.value + k * COLUMNS, b.sign, b.exponent + k * COLUMNS * sizeof(uint16_t),
                           b.shift ? b.shift + k / F8_GROUP * COLUMNS : NULL};
        int from = (int)(k % F8_GROUP); /* a step of 8 may lie in the second half of a group */
        for (int64_t i = 0; i < row_blocks; i++) {
            const f8_group *groups = a + i * stride + k / F8_GROUP;
            float *of_block = accumulators + i * F8_ROWS * COLUMNS;
            if (kind != F8_WIDE)
                for (int j = 0; j < F8_ROWS * COLUMNS; j++)
                    of_block[j] = single(model, kind, groups, from, j / COLUMNS, step, j % COLUMNS, of_block[j]);
            else if (b.shift)
                wide_step(model, groups, 0, step, of_block, 32, 1);
            else if (model->step_k == 32)
                wide_step(model, groups, 0, step, of_block, 32, 0);
            else if (model->step_k == 16)
                wide_step(model, groups, 0, step, of_block, 16, 0);
            else
                wide_step(model, groups, from, step, of_block, 8, 0);
        }
    }
}

static void steps(const f8_model *model, f8_kind kind, int64_t padded, const f8_group *a, int64_t stride, f8_columns b,
                  int64_t row_blocks, float *accumulators) {
    if (kind != F8_SINGLE) v_toward_zero();
    (kind == F8_NARROW ? narrow_steps : wide_steps)(model, kind, padded, a, stride, b, row_blocks, accumulators);
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
        float of_a = 1;
        if (is_scaled) of_a = factors->scale_a[(factors->a_offset + row) / factors->a_shared * factors->a_stride];
        if (factors->scaling == F8_VECTORS) /* [EPI-5] */
            for (int n = 0; n < COLUMNS; n++) total[n] = fmaf(partial[n] * of_a, of_b[n], total[n]);
        else if (factors->scaling == F8_SQUARES)
            for (int n = 0; n < COLUMNS; n++) total[n] = fmaf(partial[n], of_a * of_b[n], total[n]);
        else
            for (int n = 0; n < COLUMNS; n++) total[n] += partial[n]; /* [CHAIN-2] */
        memset(partial, 0, sizeof(float) * COLUMNS);
    }
}

const f8_width NAME = {NAME_TEXT, runs_here, COLUMNS, MAGNITUDES, pack_a,  pack_b,
                       steps,     promote,   largest, enlarge,    encode, hash};
