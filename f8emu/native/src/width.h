/* What gemm.c asks of a width, and the panels that they exchange. */
#ifndef F8EMU_WIDTH_H
#define F8EMU_WIDTH_H

#include <string.h>

#include "engine.h"

static inline uint32_t f8_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float f8_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline int64_t f8_smaller(int64_t x, int64_t y) { return x < y ? x : y; }

/* How the steps of a model are computed. */
typedef enum {
    F8_NARROW, /* 13 fraction bits, [ACC-1..5]: a step of float8 fits in 32-bit integers */
    F8_WIDE,   /* up to 25 fraction bits, cut to 23: half a step fits */
    F8_SINGLE  /* everything else: one output at a time, by step.c */
} f8_kind;

enum {
    F8_ROWS = 4,    /* of a row block */
    F8_GROUP = 16,  /* K of a group in the panel of a */
    F8_LONGEST_STEP = 32, /* and the longest order of K [CHIP-2] */
    F8_MX_BLOCK = 32,     /* K of an E8M0 scale */
    F8_NO_SHIFT = 32000   /* of byte 255: the sum with any exponents and another shift is beyond those of numbers */
};

/* Four rows of a by 16 of K. */
typedef struct {
    float value[F8_ROWS][F8_GROUP];       /* narrow: magnitudes, where the width multiplies magnitudes */
    uint32_t exponent[F8_ROWS][F8_GROUP]; /* biased, once a byte (narrow) or once a half-word (wide) */
    uint32_t sign[F8_ROWS][F8_GROUP];     /* 0, or the distance in bytes from the signs of b to the signs of -b */
    int32_t shift[F8_ROWS];               /* microscaled: the exponent of the scale, or F8_NO_SHIFT */
} f8_group;

/* A block of K of up to `columns` columns of b, padded with zeros; [K][columns] each. */
typedef struct {
    float *value;
    int32_t *sign;     /* [K][2][columns]: 1 or -1, then its negative; magnitudes only */
    uint8_t *exponent; /* bytes (narrow) or half-words (wide) */
    int16_t *shift;    /* [K / F8_GROUP][columns]: as in f8_group; null: no E8M0 scales */
} f8_columns;

/* Factors that a promotion multiplies with, of a block of K. */
typedef struct {
    int32_t scaling;
    const float *scale_a, *scale_b; /* of the first row and the first column of the tile */
    int64_t a_stride, b_stride;     /* from one scale to the next */
    int64_t a_shared, b_shared;     /* 128 where so many rows share one, otherwise 1 */
    int64_t a_offset, b_offset;     /* rows and columns before the tile that share its first scale */
    int64_t columns;                /* how many there are */
} f8_factors;

typedef struct {
    const char *name;
    int (*runs_here)(void);
    int columns;    /* of a tile */
    int magnitudes; /* whether narrow steps multiply magnitudes */
    /* Rows first .. first + rows, K k .. k + count: one f8_group for every row block and 16 of `padded` K. */
    void (*pack_a)(const f8_operand *a, const f8_model *model, f8_kind kind, int64_t first, int64_t rows, int64_t k,
                   int64_t count, int64_t padded, f8_group *panel);
    void (*pack_b)(const f8_operand *b, const f8_model *model, f8_kind kind, int64_t first, int64_t columns, int64_t k,
                   int64_t count, int64_t padded, f8_columns panel);
    /* The steps of `padded` K on the accumulators [4 * row_blocks][columns]; `stride` groups from row block to next. */
    void (*steps)(const f8_model *model, f8_kind kind, int64_t padded, const f8_group *a, int64_t stride,
                  f8_columns b, int64_t row_blocks, float *accumulators);
    /* totals = totals + accumulators [CHAIN-2], or [EPI-5]; accumulators = 0. */
    void (*promote)(const f8_factors *factors, int64_t rows, float *accumulators, float *totals);
    /* The largest magnitude of x, in bits of its format: as integers, NaN is above infinity. */
    uint32_t (*largest)(const void *x, int format, int64_t count);
    /* found[i] = the larger of itself and the magnitude of x[i]. */
    void (*enlarge)(const void *x, int format, int64_t count, uint32_t *found);
    /* codes[i] = cast(x[i] * factor), by one factor for all, or by one each. */
    void (*encode)(const void *x, int format, int64_t count, const float *factor, int each, const f8_target *target,
                   uint8_t *codes);
    /* f8_hash */
    uint64_t (*hash)(const uint8_t *bytes, int64_t words, uint32_t first, uint32_t bytes_of_all);
} f8_width;

extern const f8_width f8_avx512, f8_avx2, f8_portable;
const f8_width *f8_width_at(int width);

/* threads.c: `work(job)` on `threads`, this one among them, or on a team of `most`, and the environment meanwhile. */
void f8_on_threads(int64_t threads, int64_t most, void (*work)(void *job), void *job);
uint64_t f8_enter(void);
void f8_leave(uint64_t state);

typedef struct {
    int bits, fraction_bits, bias;
    uint32_t infinity; /* its magnitude; 0: none */
    uint32_t nan;      /* from this magnitude on; of FNUZ formats the code itself */
} f8_format;
extern const f8_format f8_formats[];

/* [OP-1] The value and the raw exponent of a code; F8_ABSENT of zero, infinity and NaN. */
enum { F8_ABSENT = -4000 };
void f8_decode(uint32_t code, int format, int converts, float *value, int *exponent);

/* One step of one output: accumulator + sum of a[k] * b[k] * 2^shift, of exponents exponent[k] [ACC-2..5], [MX-2]. */
float f8_step(const f8_model *model, float accumulator, const float *a, const float *b, const int32_t *exponent,
              int count, int shift);

#endif
