/* The emulated GEMM and the casts before it: what a call says, and what the parts of the engine say to each other.

   Data flow of one GEMM:

     codes  --pack-->  panels of a block of K, decoded  --step-->  accumulators  --promote-->  totals  --finish-->  out

   gemm.c cuts the GEMM into panels, hands them to threads, and finishes; a width (avx512.c, avx2.c, portable.c) is
   kernel.h on vectors of its own: it packs operands, runs the steps of the tensor core and promotes; step.c is one
   step of one output for every model and every operand. cast.c cuts a cast into parts; its loops are cast.h, on every
   width. threads.c runs both. hash.c is for hashes, and hash.h the loop of one. All widths give the same bits. Rule ids are those
   of reference/NUMERICS.md. */
#ifndef F8EMU_ENGINE_H
#define F8EMU_ENGINE_H

#include <stdint.h>

/* Raised with every change of a struct, of a number or of a function below; f8emu.native.library has the same. */
enum { F8_ABI = 5 };
int f8_abi(void);

/* Formats, as f8emu.native.gemm numbers them. */
enum { F8_E4M3FN, F8_E5M2, F8_E4M3FNUZ, F8_E5M2FNUZ, F8_BFLOAT16, F8_FLOAT16, F8_FLOAT32 };

/* How scales enter: those before F8_MICROSCALED in the epilogue, those after it in the promotions. */
enum {
    F8_UNSCALED,   /* no scales: mm */
    F8_TENSORWISE, /* [EPI-1] acc * (scale_a * scale_b) + 0 */
    F8_ROWWISE,    /* [EPI-2] (acc * scale_b) * scale_a */
    F8_GROUPED,    /* [EPI-6] (acc * scale_a) * scale_b */
    F8_MICROSCALED, /* [MX-2] 1x32: E8M0, in the steps */
    F8_VECTORS,    /* [EPI-5] 1x128 by 1x128: fma(p * scale_a, scale_b, total) */
    F8_SQUARES     /* [EPI-5] one of them 128x128: fma(p, scale_a * scale_b, total) */
};

/* f8emu.spec.AccumulationModel. A value of 0 stands for None where the field may be None. */
typedef struct {
    int32_t step_k, aligned_fraction_bits, result_fraction_bits;
    int32_t promote_k;
    int32_t nearest_even;     /* [CHIP-4] round the sum of a step, in place of cutting it */
    int32_t converts;         /* [CHIP-1] the operands become float16 first */
    int32_t order_length;     /* [CHIP-2] */
    int32_t order[32];
    int32_t interleaved;      /* [CHIP-6] 0: one sum */
    int32_t fraction_bits, accumulator_fraction_bits;
    int32_t accumulator_reach; /* below 0: the accumulator is never dropped */
    int32_t zero_exponent;     /* [BF16-1], [MX-3] of an accumulator of zero; -126 or less */
} f8_model;

/* A matrix [rows, K] of codes; strides in elements. */
typedef struct {
    const void *codes;
    int64_t row_stride, k_stride;
    int32_t format;
    int32_t rows_per_scale;  /* 128 of 128x128 scales, otherwise 1 */
    /* float32 scale[(row / rows_per_scale) * scale_row_stride + (k / 128) * scale_block_stride]; microscaled: bytes,
       and k / 32 */
    const void *scale;
    int64_t scale_row_stride, scale_block_stride; /* 0 where one scale is for all rows, or all of K */
} f8_operand;

/* out[m, n] = round(accumulate(a @ b^T) * scales + bias). */
typedef struct {
    int64_t m, n, k;
    f8_operand a, b;         /* [M, K], [N, K] */
    void *out;               /* [M, N] */
    int64_t out_row_stride, out_column_stride;
    const void *bias;        /* [N], or null */
    int64_t bias_stride;
    int32_t out_format, bias_format;
    int32_t scaling;         /* F8_UNSCALED .. F8_SQUARES */
    int32_t threads;         /* at most so many */
    int64_t slice_k;         /* [CHAIN-3] K of a slice; K or more: one slice */
    const f8_model *model;
} f8_gemm;

/* 0, or -1 where memory is short. `width` is an index of f8_width_name. */
int f8_run(const f8_gemm *gemm, int width);
/* The same `groups` GEMMs in one call: gemms[g]. */
int f8_run_all(const f8_gemm *gemms, int64_t groups, int width);
/* ---- Casts ---- */

/* A float8 format to round to. */
typedef struct {
    uint32_t fraction_bits, nan_code;
    uint32_t zero_sign; /* 0x80 where zero keeps its sign, otherwise 0 */
    uint32_t max_bits, min_normal_bits; /* of the largest value and the smallest normal one, as float32 */
    uint32_t exponent_offset; /* (127 - bias) << fraction_bits */
    float subnormal;          /* whose last place as a float32 is the smallest subnormal */
} f8_target;

/* inv_scale = largest / max(amax, amax_floor), without its fraction where power_of_two; scale = 1 / inv_scale.
   Or is_e8m0: scale is a byte, ((amax's bits + carry) >> 23) - max_exponent; inv_scale = 2^(127 - byte) [MX-1]. */
typedef struct {
    double largest, amax_floor;
    int32_t power_of_two, is_e8m0;
    uint32_t carry;
    int32_t max_exponent, infinity_byte;
} f8_rule;

enum { F8_FIND = 1, F8_SCALE = 2, F8_ENCODE = 4 };

/* A matrix [lines, positions], its positions one after the other in memory: amaxes, scales and codes of its blocks.

   Stages that are left out take the results of those before them from the same place. */
typedef struct {
    const void *x;
    int64_t line_stride, lines, positions;
    int64_t line_block, position_block; /* what shares a scale; 0: all of them */
    float *amax, *inv_scale;            /* of a block */
    void *scale;                        /* float, or uint8_t where the rule is_e8m0 */
    int64_t scale_line_stride, scale_position_stride;
    uint8_t *codes;
    int64_t code_line_stride, code_position_stride; /* one of them is 1 */
    f8_target target;
    f8_rule rule;
    int32_t format, stages, threads;
} f8_cast;

/* 0, or -1 where memory is short. */
int f8_run_cast(const f8_cast *cast, int width);
void f8_scales(const f8_rule *rule, int64_t count, const float *amax, float *inv_scale, void *scale);

/* ---- Hashes ---- */

/* Of words of 32 bits, which need no alignment: what they add to SGLang's hash of a tensor on a GPU, modulo 2^64.
   `first` is the index of the first of them in the tensor, that of a tile; `bytes_of_all` is the size of the tensor.
   Both modulo 2^32, and words are whole. */
uint64_t f8_hash(const uint8_t *bytes, int64_t words, uint32_t first, uint32_t bytes_of_all, int width);
/* products[i] = table[codes[i]] of a matrix; tables[blocks of 128 rows][blocks of 128 columns][256]. */
void f8_products(const uint8_t *codes, int64_t rows, int64_t columns, const uint16_t *tables, uint16_t *products);

/* The widths compiled in, fastest first; null past the last. */
const char *f8_width_name(int width);
int f8_width_runs_here(int width);

#endif
