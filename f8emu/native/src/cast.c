/* A whole cast: amaxes, scales and codes of a matrix, cut into parts that share no scale.

   A part is read while it is in the cache: once for its amaxes, again for its codes. Scales are as
   f8emu.torch.scale_from_amax defines them. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "width.h"

enum {
    PART = 1 << 14, /* elements of a part, about: with its codes in a cache of 128 KiB */
    TILE = 64       /* lines and positions of codes that are transposed at a time */
};
/* Elements that are worth a thread: starting one takes some 20 microseconds. */
static const int64_t WORTH_A_THREAD = 1 << 17;

typedef struct {
    const f8_cast *cast;
    const f8_width *width;
    int stages;                 /* of this run over the parts */
    int64_t lines, positions;   /* of a part */
    int64_t parts_of_lines, parts;
    atomic_llong next;
    atomic_uint largest;        /* of a tensor with one scale, in bits of its format */
    atomic_int failed;
} job;

static int64_t quotient(int64_t x, int64_t y) { return (x + y - 1) / y; }

/* A magnitude in bits of `format`, as float32; every NaN is the canonical one [SPEC-1]. */
static float magnitude_from(uint32_t bits, int format) {
    float found = f8_float(format == F8_FLOAT32 ? bits : bits << 16);
    if (format == F8_FLOAT16) {
        int exponent;
        f8_decode(bits, format, 0, &found, &exponent);
    }
    return found == found ? found : f8_float(0x7FFFFFFF);
}

/* ---- Scales ---- */

/* inv_scale = max / max(amax, floor), correctly rounded: no float64 quotient of two float32 is near a midpoint. */
static float inverse_scale(const f8_rule *rule, float amax) {
    double floored = amax < rule->amax_floor ? rule->amax_floor : amax;
    float found = (float)(rule->largest / floored);
    return rule->power_of_two && found == found ? f8_float(f8_bits(found) & 0xFF800000) : found;
}

static float reciprocal(float inv_scale) { return (float)(1.0 / (double)inv_scale); }

static int e8m0_byte(const f8_rule *rule, float amax) {
    if (amax != amax) return 255;
    uint32_t bits = amax > 0 ? f8_bits(amax) : 0;
    if (bits == 0x7F800000) return rule->infinity_byte;
    int byte = (int)((bits + rule->carry) >> 23) - rule->max_exponent;
    return byte < 0 ? 0 : byte;
}

/* inv_scale[at] and scale[at] of one amax. */
static void set_scales(const f8_rule *rule, float amax, float *inv_scale, void *scale, int64_t at) {
    if (!rule->is_e8m0) {
        inv_scale[at] = inverse_scale(rule, amax);
        ((float *)scale)[at] = reciprocal(inv_scale[at]);
        return;
    }
    int byte = e8m0_byte(rule, amax);
    ((uint8_t *)scale)[at] = (uint8_t)byte;
    /* 2^-127 is a subnormal float32. */
    inv_scale[at] = f8_float(byte == 255 ? 0x7FFFFFFF : byte == 254 ? 0x00400000 : (uint32_t)(254 - byte) << 23);
}

void f8_scales(const f8_rule *rule, int64_t count, const float *amax, float *inv_scale, void *scale) {
    uint64_t state = f8_enter();
    for (int64_t i = 0; i < count; i++) set_scales(rule, amax[i], inv_scale, scale, i);
    f8_leave(state);
}

/* ---- Codes ---- */

/* Eight by eight bytes, `x` apart in rows of in_stride, to rows of out_stride. */
static void transpose_bytes(const uint8_t *in, int64_t in_stride, uint8_t *out, int64_t out_stride) {
    uint64_t x[8];
    for (int i = 0; i < 8; i++) memcpy(&x[i], in + i * in_stride, 8);
    /* Swap halves of 4, 2 and 1 bytes between rows that are as far apart. */
    static const uint64_t low[] = {0x00000000FFFFFFFF, 0x0000FFFF0000FFFF, 0x00FF00FF00FF00FF};
    for (int step = 0, far = 4; far; step++, far /= 2)
        for (int i = 0; i < 8; i++) {
            if (i & far) continue;
            uint64_t swapped = (x[i] >> 8 * far ^ x[i + far]) & low[step];
            x[i + far] ^= swapped;
            x[i] ^= swapped << 8 * far;
        }
    for (int i = 0; i < 8; i++) memcpy(out + i * out_stride, &x[i], 8);
}

static void transpose(const uint8_t (*codes)[TILE], int64_t lines, int64_t positions, uint8_t *out, int64_t stride) {
    int64_t whole_lines = lines & ~7, whole_positions = positions & ~7;
    for (int64_t i = 0; i < whole_lines; i += 8)
        for (int64_t j = 0; j < whole_positions; j += 8)
            transpose_bytes(&codes[i][j], TILE, out + j * stride + i, stride);
    for (int64_t i = 0; i < lines; i++)
        for (int64_t j = i < whole_lines ? whole_positions : 0; j < positions; j++) out[j * stride + i] = codes[i][j];
}

/* ---- Parts ---- */

static const void *at(const f8_cast *cast, int64_t line, int64_t position) {
    int64_t size = cast->format == F8_FLOAT32 ? 4 : 2;
    return (const char *)cast->x + (line * cast->line_stride + position) * size;
}

/* What one block of scales covers in a part of `size`; the blocks there are quotient(size, of that). */
static int64_t covered(int64_t block, int64_t size) { return block ? block : size; }

/* The amaxes of lines from .. to of a part, in bits of the format, a row of blocks. */
static void find_amaxes(const job *job, int64_t line, int64_t end, int64_t position, int64_t positions,
                        uint32_t *found) {
    const f8_cast *cast = job->cast;
    int64_t block = covered(cast->position_block, positions);
    for (int64_t i = line; i < end; i++) {
        if (block == 1) {
            job->width->enlarge(at(cast, i, position), cast->format, positions, found);
            continue;
        }
        for (int64_t j = 0; j < positions; j += block) {
            int64_t count = f8_smaller(block, positions - j);
            uint32_t magnitude = job->width->largest(at(cast, i, position + j), cast->format, count);
            if (magnitude > found[j / block]) found[j / block] = magnitude;
        }
    }
}

/* The codes of some lines and positions, which share a row of factors. */
static void encode(const job *job, int64_t line, int64_t lines, int64_t position, int64_t positions, int64_t block,
                   const float *factors) {
    const f8_cast *cast = job->cast;
    int direct = cast->code_position_stride == 1;
    uint8_t codes[TILE][TILE], *out = cast->codes;
    for (int64_t j = 0, count; j < positions; j += count) {
        int64_t stop = block == 1 ? positions : f8_smaller(positions, (j / block + 1) * block);
        count = direct ? stop - j : f8_smaller(stop - j, TILE);
        const float *factor = factors + j / block;
        for (int64_t i = 0; i < lines; i++) {
            uint8_t *to = direct ? out + (line + i) * cast->code_line_stride + position + j : codes[i];
            job->width->encode(at(cast, line + i, position + j), cast->format, count, factor, block == 1,
                               &cast->target, to);
        }
        if (!direct)
            transpose((const uint8_t(*)[TILE])codes, lines, count,
                      out + line + (position + j) * cast->code_position_stride, cast->code_position_stride);
    }
}

/* All stages of the lines and positions of a part. */
static int part(job *job, int64_t line, int64_t lines, int64_t position, int64_t positions) {
    const f8_cast *cast = job->cast;
    int64_t of_lines = covered(cast->line_block, lines), of_positions = covered(cast->position_block, positions);
    int64_t blocks = quotient(positions, of_positions);
    uint32_t *amaxes = malloc((size_t)blocks * (sizeof(uint32_t) + sizeof(float)));
    if (!amaxes) return -1;
    float *factors = (float *)(amaxes + blocks);
    for (int64_t i = 0; i < lines; i += of_lines) {
        int64_t some = f8_smaller(of_lines, lines - i);
        if (job->stages & F8_FIND) {
            memset(amaxes, 0, (size_t)blocks * sizeof(uint32_t));
            find_amaxes(job, line + i, line + i + some, position, positions, amaxes);
            if (!(cast->line_block || cast->position_block)) { /* one scale: parts join */
                unsigned known = job->largest;
                while (amaxes[0] > known && !atomic_compare_exchange_weak(&job->largest, &known, amaxes[0]));
                continue;
            }
        }
        for (int64_t j = 0; j < blocks; j++) {
            int64_t to = (cast->line_block ? (line + i) / cast->line_block : 0) * cast->scale_line_stride +
                         (cast->position_block ? position / cast->position_block + j : 0) * cast->scale_position_stride;
            if (job->stages & F8_FIND) cast->amax[to] = magnitude_from(amaxes[j], cast->format);
            if (job->stages & F8_SCALE) set_scales(&cast->rule, cast->amax[to], cast->inv_scale, cast->scale, to);
            if (job->stages & F8_ENCODE) factors[j] = cast->inv_scale[to];
        }
        for (int64_t first = 0; job->stages & F8_ENCODE && first < some; first += TILE)
            encode(job, line + i + first, f8_smaller(TILE, some - first), position, positions, of_positions, factors);
    }
    free(amaxes);
    return 0;
}

static void work(void *given) {
    job *job = given;
    const f8_cast *cast = job->cast;
    for (int64_t i; (i = job->next++) < job->parts;) {
        int64_t line = i % job->parts_of_lines * job->lines, position = i / job->parts_of_lines * job->positions;
        if (part(job, line, f8_smaller(job->lines, cast->lines - line), position,
                 f8_smaller(job->positions, cast->positions - position)))
            job->failed = 1;
    }
}

static int run(const f8_cast *cast, const f8_width *width, int stages, uint32_t *largest) {
    job job = {.cast = cast, .width = width, .stages = stages, .largest = 0};
    /* 1. Parts of whole blocks. Where a scale is of all lines, whole columns of the matrix; otherwise whole lines. */
    int is_one = !cast->line_block && !cast->position_block;
    job.lines = cast->lines, job.positions = cast->positions;
    if (is_one || cast->line_block) {
        int64_t step = is_one || cast->line_block == 1 ? TILE : cast->line_block;
        job.lines = quotient(quotient(PART, cast->positions), step) * step;
    } else {
        int64_t step = cast->position_block == 1 ? TILE : cast->position_block;
        job.positions = quotient(quotient(PART, cast->lines), step) * step;
    }
    job.parts_of_lines = quotient(cast->lines, job.lines);
    job.parts = job.parts_of_lines * quotient(cast->positions, job.positions);
    /* 2. Run them. */
    int64_t threads = f8_smaller(f8_smaller(cast->threads, cast->lines * cast->positions / WORTH_A_THREAD), job.parts);
    f8_on_threads(threads, cast->threads, work, &job);
    if (largest) *largest = job.largest;
    return job.failed ? -1 : 0;
}

int f8_run_cast(const f8_cast *cast, int width) {
    const f8_width *of = f8_width_at(width);
    int stages = cast->stages, failed = 0;
    if (!cast->line_block && !cast->position_block) {
        uint32_t largest = 0;
        if (stages & F8_FIND) {
            failed = run(cast, of, F8_FIND, &largest);
            *cast->amax = magnitude_from(largest, cast->format);
        }
        if (stages & F8_SCALE) f8_scales(&cast->rule, 1, cast->amax, cast->inv_scale, cast->scale);
        stages &= F8_ENCODE;
    }
    if (stages && !failed) failed = run(cast, of, stages, 0);
    return failed;
}
