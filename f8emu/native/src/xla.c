/* The GEMM as a custom call of XLA: its buffers become a f8_gemm.

   f8emu/jax/gemm/emulation.py makes the calls, and packs `options`. Operands are row-major, as they are in Python:

     mm       a [M, K], b [K, N]                                                      -> [M, N]
     scaled   a, b, scale_a, scale_b, and a bias [N] if there is one                  -> [M, N]
     grouped  a [M, K], b [G, K, N], scale_a [M], scale_b [G, N], ends of groups [G]  -> [M, N]

   E8M0 scales are [M, B] and [B, N] or [G, B, N], B being the blocks of 32 of K.
   Of mm and scaled each may have dimensions before these, of the same GEMM many times; 1 stands for all of them. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"
#include "xla.h"

enum { BLOCK_K = 128, MX_BLOCK_K = 32, MOST_OPERANDS = 5 };

/* How many rows and columns share a scale; f8emu.spec.Granularity. */
enum { ALL, ROW, BLOCK_1X128, BLOCK_128X128, BLOCK_1X32 };

/* The attribute "options", little-endian as the machine; emulation.py has the same struct. */
typedef struct {
    int32_t size; /* of this struct: tells apart a program that another version exported */
    int32_t width; /* below 0: the fastest that runs here */
    int32_t threads; /* below 1: as many as XLA has */
    int32_t scaling;
    int32_t granularity_a, granularity_b;
    int32_t is_transposed; /* the result is [N, M] */
    int32_t is_grouped;
    int64_t slice_k;
    f8_model model;
} xla_options;

typedef const char *problem; /* null: none */

static int format_of(int dtype) {
    switch (dtype) {
    case XLA_E4M3FN: return F8_E4M3FN;
    case XLA_E5M2: return F8_E5M2;
    case XLA_E4M3FNUZ: return F8_E4M3FNUZ;
    case XLA_E5M2FNUZ: return F8_E5M2FNUZ;
    case XLA_BFLOAT16: return F8_BFLOAT16;
    case XLA_FLOAT16: return F8_FLOAT16;
    case XLA_FLOAT32: return F8_FLOAT32;
    default: return -1;
    }
}

static int64_t bytes_of(int format) { return format <= F8_E5M2FNUZ ? 1 : format == F8_FLOAT32 ? 4 : 2; }

/* ---- Buffers ---- */

/* A buffer as many arrays of `rank` dimensions. */
typedef struct {
    char *data;
    const int64_t *extents;
    int64_t many, elements; /* arrays, and elements of each */
    int format;             /* -1: no format of a GEMM's operand or result */
    int dtype;
} arrays;

static int take(const xla_values *from, int64_t at, int64_t rank, arrays *found) {
    const xla_buffer *buffer = from->items[at];
    if (from->kinds[at] != XLA_IS_BUFFER || buffer->rank < rank) return 0;
    *found = (arrays){.data = buffer->data, .extents = buffer->extents + buffer->rank - rank, .many = 1, .elements = 1,
                      .format = format_of(buffer->dtype), .dtype = buffer->dtype};
    for (int64_t i = 0; i < buffer->rank - rank; i++) found->many *= buffer->extents[i];
    for (int64_t i = 0; i < rank; i++) found->elements *= found->extents[i];
    return 1;
}

/* Array `which` of them, or the one that is for all. */
static void *nth(const arrays *found, int64_t which) {
    return found->data + (found->many == 1 ? 0 : which * found->elements * bytes_of(found->format));
}

static int64_t blocks(int64_t extent, int64_t block) { return (extent + block - 1) / block; }

/* The scales of an operand of `rows` rows: their strides. `is_b`: transposed, [blocks of K, rows]. */
static problem scale(f8_operand *operand, const arrays *scales, int granularity, int64_t rows, int64_t k, int is_b) {
    int64_t down = granularity == ALL ? 1 : granularity == BLOCK_128X128 ? blocks(rows, BLOCK_K) : rows;
    int is_e8m0 = granularity == BLOCK_1X32;
    int64_t along = granularity >= BLOCK_1X128 ? blocks(k, is_e8m0 ? MX_BLOCK_K : BLOCK_K) : 1;
    if (scales->dtype != (is_e8m0 ? XLA_E8M0FNU : XLA_FLOAT32))
        return "f8emu: scales must be float32, those of blocks of 32 E8M0";
    if (scales->elements != down * along) return "f8emu: scales have another shape than their granularity";
    operand->rows_per_scale = granularity == BLOCK_128X128 ? BLOCK_K : 1;
    operand->scale_row_stride = granularity == ALL ? 0 : is_b ? 1 : along;
    operand->scale_block_stride = granularity < BLOCK_1X128 ? 0 : is_b ? down : 1;
    return 0;
}

/* ---- The calls ---- */

static problem run(const f8_gemm *gemms, int64_t count, int width, int *is_memory) {
    if (width < 0)
        while (!f8_width_runs_here(++width)) {} /* the portable one runs everywhere */
    if (!f8_width_runs_here(width)) return "f8emu: the engine's width does not run here";
    if (!f8_run_all(gemms, count, width)) return 0;
    *is_memory = 1;
    return "f8emu: memory is short";
}

static problem mm(const xla_call *call, const xla_options *options, int threads, int *is_memory) {
    const xla_values *in = &call->operands;
    int is_scaled = options->scaling != F8_UNSCALED, has_bias = in->count == 5;
    if (in->count != (is_scaled ? 4 + has_bias : 2)) return "f8emu: wrong number of operands";
    arrays a, b, out, scales[2] = {{0}}, bias = {0};
    if (!take(in, 0, 2, &a) || !take(in, 1, 2, &b) || !take(&call->results, 0, 2, &out))
        return "f8emu: a, b and the result must be matrices";
    int64_t m = a.extents[0], k = a.extents[1], n = b.extents[1], is_transposed = options->is_transposed != 0;
    if (b.extents[0] != k || out.extents[is_transposed] != m || out.extents[!is_transposed] != n)
        return "f8emu: a, b and the result must be [M, K], [K, N] and [M, N]";
    if (a.format < 0 || b.format < 0 || out.format < F8_BFLOAT16 || a.format > F8_FLOAT16 || b.format > F8_FLOAT16)
        return "f8emu: a, b or the result has a dtype that the engine does not know";
    f8_gemm gemm = {
        .m = m, .n = n, .k = k,
        .a = {.row_stride = k, .k_stride = 1, .format = a.format, .rows_per_scale = 1},
        .b = {.row_stride = 1, .k_stride = n, .format = b.format, .rows_per_scale = 1},
        .out_row_stride = is_transposed ? 1 : n, .out_column_stride = is_transposed ? m : 1,
        .bias_stride = 1, .out_format = out.format,
        .scaling = options->scaling, .threads = threads, .slice_k = options->slice_k, .model = &options->model,
    };
    int64_t many = out.many;
    if (is_scaled) {
        /* One scale may have any rank. */
        int64_t rank_a = options->granularity_a == ALL ? 0 : 2, rank_b = options->granularity_b == ALL ? 0 : 2;
        if (!take(in, 2, rank_a, &scales[0]) || !take(in, 3, rank_b, &scales[1])) return "f8emu: scales of low rank";
        problem found = scale(&gemm.a, &scales[0], options->granularity_a, m, k, 0);
        if (!found) found = scale(&gemm.b, &scales[1], options->granularity_b, n, k, 1);
        if (found) return found;
    }
    if (has_bias) {
        if (!take(in, 4, 1, &bias) || bias.extents[0] != n || bias.format < F8_BFLOAT16)
            return "f8emu: bias must be [N] of a high precision";
        gemm.bias_format = bias.format;
    }
    const arrays *all[] = {&a, &b, &scales[0], &scales[1], &bias};
    for (int64_t i = 0; i < in->count; i++)
        if (all[i]->many != 1 && all[i]->many != many) return "f8emu: operands of different numbers of GEMMs";
    f8_gemm *gemms = many == 1 ? &gemm : calloc((size_t)many + 1, sizeof(f8_gemm));
    *is_memory = !gemms;
    if (!gemms) return "f8emu: memory is short";
    for (int64_t i = 0; i < many; i++) {
        gemms[i] = gemm;
        gemms[i].a.codes = nth(&a, i), gemms[i].b.codes = nth(&b, i), gemms[i].out = nth(&out, i);
        if (is_scaled) gemms[i].a.scale = nth(&scales[0], i), gemms[i].b.scale = nth(&scales[1], i);
        if (has_bias) gemms[i].bias = nth(&bias, i);
    }
    problem found = run(gemms, many, options->width, is_memory);
    if (gemms != &gemm) free(gemms);
    return found;
}

static problem grouped(const xla_call *call, const xla_options *options, int threads, int *is_memory) {
    const xla_values *in = &call->operands;
    arrays a, b, scale_a, scale_b, ends, out;
    int is_e8m0 = options->scaling == F8_MICROSCALED;
    if (in->count != 5) return "f8emu: wrong number of operands";
    if (!take(in, 0, 2, &a) || !take(in, 1, 3, &b) || !take(in, 2, 1 + is_e8m0, &scale_a) ||
        !take(in, 3, 2 + is_e8m0, &scale_b) || !take(in, 4, 1, &ends) || !take(&call->results, 0, 2, &out) || out.many != 1)
        return "f8emu: operands of a grouped GEMM have wrong ranks";
    int64_t m = a.extents[0], k = a.extents[1], groups = b.extents[0], n = b.extents[2];
    int64_t along = is_e8m0 ? blocks(k, MX_BLOCK_K) : 1, scale_bytes = is_e8m0 ? 1 : 4;
    if (b.extents[1] != k || scale_a.extents[0] != m || scale_b.extents[0] != groups ||
        scale_b.extents[1 + is_e8m0] != n || scale_a.elements != m * along || scale_b.elements != groups * along * n ||
        ends.extents[0] != groups || out.extents[0] != m || out.extents[1] != n)
        return "f8emu: operands of a grouped GEMM have wrong shapes";
    if (a.format < 0 || b.format < 0 || out.format < F8_BFLOAT16 || scale_a.dtype != scale_b.dtype ||
        scale_a.dtype != (is_e8m0 ? XLA_E8M0FNU : XLA_FLOAT32) || ((const xla_buffer *)in->items[4])->dtype != XLA_INT32)
        return "f8emu: an operand of a grouped GEMM has a wrong dtype";
    f8_gemm *gemms = calloc((size_t)groups + 1, sizeof(f8_gemm));
    *is_memory = !gemms;
    if (!gemms) return "f8emu: memory is short";
    int64_t bytes = bytes_of(out.format), of_b = bytes_of(b.format), count = 0, start = 0;
    memset(out.data, 0, (size_t)(m * n * bytes)); /* rows of no group */
    for (int64_t g = 0; g < groups; g++) {
        int64_t end = ((const int32_t *)(void *)ends.data)[g];
        int64_t first = start < 0 ? 0 : start, last = end > m ? m : end;
        start = end;
        if (first >= last) continue;
        gemms[count++] = (f8_gemm){
            .m = last - first, .n = n, .k = k,
            .a = {.codes = a.data + first * k * bytes_of(a.format), .row_stride = k, .k_stride = 1,
                  .format = a.format, .rows_per_scale = 1,
                  .scale = scale_a.data + first * along * scale_bytes, .scale_row_stride = along,
                  .scale_block_stride = is_e8m0},
            .b = {.codes = b.data + g * k * n * of_b, .row_stride = 1, .k_stride = n, .format = b.format,
                  .rows_per_scale = 1, .scale = scale_b.data + g * along * n * scale_bytes, .scale_row_stride = 1,
                  .scale_block_stride = is_e8m0 ? n : 0},
            .out = out.data + first * n * bytes, .out_row_stride = n, .out_column_stride = 1,
            .out_format = out.format, .scaling = options->scaling, .threads = threads, .slice_k = options->slice_k,
            .model = &options->model,
        };
    }
    problem found = run(gemms, count, options->width, is_memory);
    free(gemms);
    return found;
}

/* ---- The interface ---- */

static void *error(const xla_api *api, problem message, int kind) {
    xla_new_error error = {.size = offsetof(xla_new_error, kind) + sizeof error.kind, .message = message, .kind = kind};
    return api->new_error(&error);
}

/* Calls that run now: those of several devices, or of several parts of a program. */
static atomic_int running;

/* The threads that XLA itself computes with, shared by the calls that run; its pool has one for each virtual device,
   even where there are fewer processors. */
static int threads_of(const xla_call *call) {
    int64_t threads = 0, processors = sysconf(_SC_NPROCESSORS_ONLN);
    xla_thread_count question = {.size = sizeof question, .context = call->context, .threads = &threads};
    xla_old_error failure = {.size = sizeof failure, .error = call->api->thread_count(&question)};
    if (failure.error) call->api->free_error(&failure);
    if (processors >= 1 && threads > processors) threads = processors;
    threads /= running;
    return threads < 1 ? 1 : (int)threads;
}

/* The handler. */
void *f8_xla_gemm(const xla_call *call) {
    /* 1. XLA first asks which version this is, when the handler is registered. */
    if (call->extensions && call->extensions->kind == XLA_IS_METADATA_QUERY) {
        xla_metadata *answer = ((xla_metadata_query *)call->extensions)->answer;
        answer->version.major = XLA_MAJOR, answer->version.minor = XLA_OLDEST_MINOR;
        answer->traits = 0, answer->state_type = 0;
        return 0;
    }
    if (call->stage != XLA_EXECUTE) return 0;
    /* 2. The options, which XLA need not have aligned. */
    xla_options options;
    const xla_attributes *attributes = &call->attributes;
    const xla_array *packed = attributes->count == 1 ? attributes->items[0] : 0;
    if (!packed || attributes->kinds[0] != XLA_IS_ARRAY || packed->dtype != XLA_UINT8 ||
        packed->count != sizeof options)
        return error(call->api, "f8emu: this program was made by another version of f8emu; make it again",
                     XLA_INVALID_ARGUMENT);
    memcpy(&options, packed->data, sizeof options);
    if (options.size != sizeof options || call->results.count != 1)
        return error(call->api, "f8emu: this program was made by another version of f8emu; make it again",
                     XLA_INVALID_ARGUMENT);
    /* 3. The GEMM. */
    running++;
    int threads = options.threads < 1 ? threads_of(call) : options.threads, is_memory = 0;
    problem found = (options.is_grouped ? grouped : mm)(call, &options, threads, &is_memory);
    running--;
    return found ? error(call->api, found, is_memory ? XLA_RESOURCE_EXHAUSTED : XLA_INVALID_ARGUMENT) : 0;
}
