/* A whole GEMM: panels, threads, promotion, slices of K, and the epilogue. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "width.h"

enum {
    BLOCK_K = 128, /* K that shares a scale */
    PANEL_K = 256, /* K that is decoded at a time, a multiple of every step, promotion and order of K */
    PANEL_ROWS = 256,
    PANEL_COLUMNS = 512
};
/* Multiply-adds that are worth a thread: starting one takes some 20 microseconds. */
static const int64_t WORTH_A_THREAD = 1 << 20;

static const f8_width *const widths[] = {
#if defined(__x86_64__)
    &f8_avx512, &f8_avx2,
#endif
    &f8_portable,
};
enum { WIDTHS = sizeof widths / sizeof *widths };

const char *f8_width_name(int width) { return width < 0 || width >= WIDTHS ? NULL : widths[width]->name; }

const f8_width *f8_width_at(int width) { return widths[width]; }

int f8_width_runs_here(int width) { return width >= 0 && width < WIDTHS && widths[width]->runs_here(); }

int f8_abi(void) { return F8_ABI; }

static int64_t rounded_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

/* ---- The epilogue ---- */

/* [EPI-4] One rounding to nearest even; every NaN is all ones but the sign. */
static uint16_t bfloat16_from(float x) {
    uint32_t bits = f8_bits(x);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static uint16_t float16_from(float x) {
    uint32_t bits = f8_bits(x), magnitude = bits & 0x7FFFFFFF, sign = bits >> 16 & 0x8000;
    if (magnitude > 0x7F800000) return 0x7FFF;
    if (magnitude >= 0x477FF000) return (uint16_t)(sign | 0x7C00);
    if (magnitude < 0x38800000) /* subnormal: the sum is rounded at float16's smallest place */
        return (uint16_t)(sign | (f8_bits(f8_float(magnitude) + 0.5f) - 0x3F000000));
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13));
}

static float high_precision(const void *x, int format, int64_t at) {
    if (format == F8_FLOAT32) return ((const float *)x)[at];
    float value;
    int exponent;
    f8_decode(((const uint16_t *)x)[at], format, 0, &value, &exponent);
    return value;
}

/* What the columns of a tile are multiplied with and added to. */
typedef struct {
    float scale[64], bias[64];
} column_terms;

/* `columns` outputs of a row: [EPI-1..4], [EPI-6]. */
static void finish(const f8_gemm *gemm, int64_t row, int64_t column, int64_t columns, const column_terms *terms,
                   const float *accumulators) {
    float found[64], of_row = 1;
    if (gemm->a.scale && gemm->scaling < F8_MICROSCALED)
        of_row = ((const float *)gemm->a.scale)[row * gemm->a.scale_row_stride];
    for (int64_t n = 0; n < columns; n++) {
        float x = accumulators[n];
        if (gemm->scaling == F8_TENSORWISE) x = x * (of_row * terms->scale[n]) + 0.0f;
        if (gemm->scaling == F8_ROWWISE) x = (x * terms->scale[n]) * of_row;
        if (gemm->scaling == F8_GROUPED) x = (x * of_row) * terms->scale[n];
        found[n] = x;
    }
    if (gemm->bias) /* [EPI-3] */
        for (int64_t n = 0; n < columns; n++) found[n] += terms->bias[n];
    int64_t step = gemm->out_column_stride, at = row * gemm->out_row_stride + column * step;
    if (gemm->out_format == F8_FLOAT32)
        for (int64_t n = 0; n < columns; n++)
            ((float *)gemm->out)[at + n * step] = found[n] == found[n] ? found[n] : f8_float(0x7FFFFFFF);
    else if (gemm->out_format == F8_BFLOAT16)
        for (int64_t n = 0; n < columns; n++) ((uint16_t *)gemm->out)[at + n * step] = bfloat16_from(found[n]);
    else
        for (int64_t n = 0; n < columns; n++) ((uint16_t *)gemm->out)[at + n * step] = float16_from(found[n]);
}

/* ---- Panels ---- */

typedef struct {
    const f8_gemm *gemm;
    const f8_width *width;
    f8_kind kind;
    int64_t rows, columns;     /* of a panel of outputs */
    int64_t panels_m, panels_n;
    atomic_llong next;
    atomic_int failed;
} job;

/* Memory of a thread. */
typedef struct {
    f8_group *a;
    f8_columns b;
    float *accumulators, *totals, *sums; /* [tiles][rows][columns of a tile] */
} workspace;

static f8_kind kind_of(const f8_gemm *gemm) {
    const f8_model *model = gemm->model;
    int format_a = gemm->a.format, format_b = gemm->b.format, is_scaled = gemm->scaling == F8_MICROSCALED;
    int is_one_sum = !model->interleaved && !model->nearest_even;
    int is_plain = !model->order_length && !model->converts && format_a <= F8_E5M2 && format_b <= F8_E5M2;
    int bits = model->aligned_fraction_bits, step = model->step_k;
    if (is_one_sum && is_plain && !is_scaled && bits == 13 && model->result_fraction_bits == 13 && (step == 16 || step == 32))
        return F8_NARROW;
    int fits = (!is_scaled && (step == 8 || step == 16)) || (step == 32 && format_a < F8_BFLOAT16 && format_b < F8_BFLOAT16);
    return is_one_sum && fits && bits <= 25 && model->result_fraction_bits == 23 ? F8_WIDE : F8_SINGLE;
}

/* K between two promotions; 0: none. */
static int64_t promotion_k(const f8_gemm *gemm) {
    return gemm->scaling > F8_MICROSCALED ? BLOCK_K : gemm->model->promote_k;
}

/* The factors of a promotion of the tile at (row, column), for the block of K that ends at `k`. */
static f8_factors factors_of(const f8_gemm *gemm, int64_t row, int64_t column, int64_t columns, int64_t k) {
    const f8_operand *a = &gemm->a, *b = &gemm->b;
    f8_factors factors = {.scaling = gemm->scaling};
    if (gemm->scaling <= F8_MICROSCALED) return factors;
    int64_t block = (k - 1) / BLOCK_K;
    const float *of_a = a->scale, *of_b = b->scale;
    factors.scale_a = of_a + row / a->rows_per_scale * a->scale_row_stride + block * a->scale_block_stride;
    factors.scale_b = of_b + column / b->rows_per_scale * b->scale_row_stride + block * b->scale_block_stride;
    factors.a_stride = a->scale_row_stride, factors.b_stride = b->scale_row_stride;
    factors.a_shared = a->rows_per_scale, factors.b_shared = b->rows_per_scale;
    factors.a_offset = row % a->rows_per_scale, factors.b_offset = column % b->rows_per_scale;
    factors.columns = columns;
    return factors;
}

/* [MX-1] The exponent of the scale of (row, k); F8_NO_SHIFT of NaN. */
static int shift_of(const f8_operand *x, int64_t row, int64_t k) {
    const uint8_t *scale = x->scale;
    uint8_t byte = scale[row * x->scale_row_stride + k / F8_MX_BLOCK * x->scale_block_stride];
    return byte == 255 ? F8_NO_SHIFT : byte - 127;
}

/* The shifts of rows first .. first + rows, K k .. k + padded, beside what pack_a packs. */
static void shift_a(const f8_operand *a, int64_t first, int64_t rows, int64_t k, int64_t padded, f8_group *panel) {
    for (int64_t row = 0; row < rounded_up(rows, F8_ROWS); row++)
        for (int64_t g = 0; g < padded / F8_GROUP; g++)
            panel[row / F8_ROWS * (padded / F8_GROUP) + g].shift[row % F8_ROWS] =
                row < rows ? shift_of(a, first + row, k + g * F8_GROUP) : 0;
}

/* Those of columns first .. first + columns of a tile. */
static void shift_b(const f8_operand *b, int64_t first, int64_t columns, int64_t tile, int64_t k, int64_t padded,
                    int16_t *shift) {
    for (int64_t n = 0; n < tile; n++)
        for (int64_t g = 0; g < padded / F8_GROUP; g++)
            shift[g * tile + n] = (int16_t)(n < columns ? shift_of(b, first + n, k + g * F8_GROUP) : 0);
}

/* K k .. k + count of all tiles of a panel: decode, step, promote. */
static void block_of_k(const job *job, const workspace *space, int64_t row, int64_t rows, int64_t column,
                       int64_t columns, int64_t slice, int64_t slice_end, int64_t k, int64_t count) {
    const f8_gemm *gemm = job->gemm;
    const f8_width *width = job->width;
    int64_t padded = rounded_up(count, F8_LONGEST_STEP), promoted = promotion_k(gemm), tile = width->columns;
    int64_t row_blocks = (rows + F8_ROWS - 1) / F8_ROWS;
    width->pack_a(&gemm->a, gemm->model, job->kind, row, rows, k, count, padded, space->a);
    if (space->b.shift) shift_a(&gemm->a, row, rows, k, padded, space->a);
    for (int64_t first = 0; first < columns; first += tile) {
        int64_t some = f8_smaller(tile, columns - first), at = first / tile * job->rows * tile;
        width->pack_b(&gemm->b, gemm->model, job->kind, column + first, some, k, count, padded, space->b);
        if (space->b.shift) shift_b(&gemm->b, column + first, some, tile, k, padded, space->b.shift);
        /* Parts of the block up to the next promotion. */
        for (int64_t done = 0; done < count;) {
            int64_t part = promoted ? f8_smaller(promoted - (k - slice + done) % promoted, padded - done) : padded;
            int64_t bytes = job->kind == F8_NARROW ? 1 : 2;
            f8_columns b = {space->b.value + done * tile, space->b.sign + done * 2 * tile,
                            space->b.exponent + done * tile * bytes,
                            space->b.shift ? space->b.shift + done / F8_GROUP * tile : NULL};
            width->steps(gemm->model, job->kind, part, space->a + done / F8_GROUP, padded / F8_GROUP, b, row_blocks,
                         space->accumulators + at);
            done += part;
            int64_t end = f8_smaller(k + done, slice_end);
            if (promoted && ((end - slice) % promoted == 0 || end == slice_end)) {
                f8_factors factors = factors_of(gemm, row, column + first, some, end);
                width->promote(&factors, rows, space->accumulators + at, space->totals + at);
            }
        }
    }
}

static void panel(const job *job, const workspace *space, int64_t row, int64_t column) {
    const f8_gemm *gemm = job->gemm;
    int64_t tile = job->width->columns, rows = f8_smaller(job->rows, gemm->m - row);
    int64_t columns = f8_smaller(job->columns, gemm->n - column), tiles = (columns + tile - 1) / tile;
    size_t bytes = sizeof(float) * (size_t)(tiles * job->rows * tile);
    float *result = promotion_k(gemm) ? space->totals : space->accumulators;
    if (gemm->k == 0) memset(result, 0, bytes);
    for (int64_t slice = 0; slice < gemm->k; slice += gemm->slice_k) { /* [CHAIN-3] */
        int64_t end = f8_smaller(gemm->k, slice + gemm->slice_k);
        memset(space->accumulators, 0, bytes);
        if (promotion_k(gemm)) memset(space->totals, 0, bytes);
        for (int64_t k = slice; k < end; k += PANEL_K)
            block_of_k(job, space, row, rows, column, columns, slice, end, k, f8_smaller(PANEL_K, end - k));
        if (slice == 0 && end == gemm->k) break;
        for (int64_t i = 0; i < tiles * job->rows * tile; i++)
            space->sums[i] = slice == 0 ? result[i] : space->sums[i] + result[i];
    }
    if (gemm->slice_k < gemm->k) result = space->sums;
    for (int64_t first = 0; first < columns; first += tile) {
        int64_t some = f8_smaller(tile, columns - first);
        column_terms terms;
        for (int64_t n = 0; n < some; n++) {
            int64_t at = column + first + n;
            const float *scale = gemm->scaling < F8_MICROSCALED ? gemm->b.scale : NULL;
            terms.scale[n] = scale ? scale[at * gemm->b.scale_row_stride] : 1;
            terms.bias[n] = gemm->bias ? high_precision(gemm->bias, gemm->bias_format, at * gemm->bias_stride) : 0;
        }
        for (int64_t i = 0; i < rows; i++)
            finish(gemm, row + i, column + first, some, &terms, result + (first / tile * job->rows + i) * tile);
    }
}

/* ---- Threads ---- */

/* Memory for one thread; 0 where it is short. */
static char *prepare(const job *job, workspace *space) {
    int64_t tile = job->width->columns, slices = job->gemm->slice_k < job->gemm->k;
    int64_t k = rounded_up(f8_smaller(PANEL_K, job->gemm->k ? job->gemm->k : 1), F8_LONGEST_STEP);
    size_t of_outputs = sizeof(float) * (size_t)(job->rows * rounded_up(job->columns, tile));
    size_t sizes[] = {
        sizeof(f8_group) * (size_t)(job->rows / F8_ROWS * (k / F8_GROUP)),
        sizeof(float) * (size_t)(k * tile),
        job->width->magnitudes ? sizeof(int32_t) * 2 * (size_t)(k * tile) : 0,
        sizeof(uint16_t) * (size_t)(k * tile),
        of_outputs,
        promotion_k(job->gemm) ? of_outputs : 0,
        slices ? of_outputs : 0,
        job->gemm->scaling == F8_MICROSCALED ? sizeof(int16_t) * (size_t)(k / F8_GROUP * tile) : 0,
    };
    enum { PARTS = sizeof sizes / sizeof *sizes };
    void **parts[] = {(void **)&space->a, (void **)&space->b.value, (void **)&space->b.sign,
                      (void **)&space->b.exponent, (void **)&space->accumulators, (void **)&space->totals,
                      (void **)&space->sums, (void **)&space->b.shift};
    size_t total = 64;
    for (int i = 0; i < PARTS; i++) total += sizes[i] = (sizes[i] + 63) / 64 * 64;
    char *memory = malloc(total), *at = memory;
    if (!memory) return 0;
    at += -(uintptr_t)at % 64;
    for (int i = 0; i < PARTS; i++) *parts[i] = at, at += sizes[i];
    if (job->gemm->scaling != F8_MICROSCALED) space->b.shift = NULL;
    return memory;
}

static void work(void *given) {
    job *job = given;
    workspace space;
    char *memory = prepare(job, &space);
    if (!memory) job->failed = 1;
    for (int64_t i; memory && (i = job->next++) < job->panels_m * job->panels_n;)
        panel(job, &space, i / job->panels_n * job->rows, i % job->panels_n * job->columns);
    free(memory);
}

/* Panels small enough that every thread has some, and no larger than the outputs. */
static void cut(job *job, int64_t threads) {
    const f8_gemm *gemm = job->gemm;
    int64_t tile = job->width->columns;
    job->rows = f8_smaller(PANEL_ROWS, rounded_up(gemm->m, F8_ROWS));
    job->columns = f8_smaller(PANEL_COLUMNS, rounded_up(gemm->n, tile));
    for (;;) {
        job->panels_m = (gemm->m + job->rows - 1) / job->rows;
        job->panels_n = (gemm->n + job->columns - 1) / job->columns;
        if (threads == 1 || job->panels_m * job->panels_n >= 3 * threads) return;
        if (job->columns > tile && job->columns >= job->rows)
            job->columns = rounded_up(job->columns / 2, tile);
        else if (job->rows > 32)
            job->rows = rounded_up(job->rows / 2, F8_ROWS);
        else if (job->columns > tile)
            job->columns = rounded_up(job->columns / 2, tile);
        else
            return;
    }
}

int f8_run(const f8_gemm *gemm, int width) {
    if (gemm->m == 0 || gemm->n == 0) return 0;
    job job = {.gemm = gemm, .width = widths[width], .kind = kind_of(gemm)};
    double multiply_adds = (double)gemm->m * (double)gemm->n * (double)gemm->k;
    int64_t threads = f8_smaller(gemm->threads, (int64_t)(multiply_adds / (double)WORTH_A_THREAD));
    threads = threads < 1 ? 1 : threads;
    cut(&job, threads);
    f8_on_threads(f8_smaller(threads, job.panels_m * job.panels_n), gemm->threads, work, &job);
    return job.next >= job.panels_m * job.panels_n && !job.failed ? 0 : -1;
}

int f8_run_all(const f8_gemm *gemms, int64_t groups, int width) {
    for (int64_t g = 0; g < groups; g++)
        if (f8_run(&gemms[g], width)) return -1;
    return 0;
}
