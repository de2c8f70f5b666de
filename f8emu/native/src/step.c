/* One step of the tensor core for one output, for every model and every operand. */
#include <math.h>
#include <string.h>

#include "width.h"

/* 2^n as float64, -1022 <= n <= 1023. */
static double power_of_two(int n) {
    uint64_t bits = (uint64_t)(n + 1023) << 52;
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

/* Of a finite number that is not zero: floor(log2(magnitude)). */
static int exponent_of(double x) {
    int exponent;
    frexp(x, &exponent);
    return exponent - 1;
}

const f8_format f8_formats[] = {
    [F8_E4M3FN] = {8, 3, 7, 0, 0x7F},             [F8_E5M2] = {8, 2, 15, 0x7C, 0x7D},
    [F8_E4M3FNUZ] = {8, 3, 8, 0, 0x80},           [F8_E5M2FNUZ] = {8, 2, 16, 0, 0x80},
    [F8_BFLOAT16] = {16, 7, 127, 0x7F80, 0x7F81}, [F8_FLOAT16] = {16, 10, 15, 0x7C00, 0x7C01},
};

void f8_decode(uint32_t code, int format, int converts, float *value, int *exponent) {
    f8_format f = f8_formats[format];
    int bits = f.bits, fraction_bits = f.fraction_bits, bias = f.bias;
    uint32_t magnitude = code & ((1u << (bits - 1)) - 1), negative = code >> (bits - 1);
    int is_fnuz = format == F8_E4M3FNUZ || format == F8_E5M2FNUZ;
    /* 1. What is no number, and zero. */
    int is_nan = is_fnuz ? code == f.nan : magnitude >= f.nan;
    *exponent = F8_ABSENT;
    if (is_nan) {
        *value = f8_float(0x7FFFFFFF);
        return;
    }
    if (f.infinity && magnitude == f.infinity) {
        *value = f8_float(negative << 31 | 0x7F800000);
        return;
    }
    if (magnitude == 0) {
        *value = f8_float(negative << 31);
        return;
    }
    /* 2. A subnormal has the exponent of field 1 and no hidden bit: it is not normalised. */
    int field = (int)(magnitude >> fraction_bits);
    int significand = (int)(magnitude & ((1u << fraction_bits) - 1)) | (field ? 1 << fraction_bits : 0);
    *exponent = (field ? field : 1) - bias;
    double x = significand * power_of_two(*exponent - fraction_bits);
    *value = (float)(negative ? -x : x); /* exact: bfloat16 too has float32's subnormals */
    if (converts) { /* [CHIP-1] float16 has more exponents, so fewer subnormals. */
        int normalised = exponent_of(x);
        *exponent = normalised < -14 ? -14 : normalised;
    }
}

/* [CHIP-6] The sum of the products, and their largest exponent. */
static double floored_dot(const f8_model *model, const double *product, const int32_t *exponent, int count,
                          int *largest) {
    double sums[8];
    int e_max = 2 * F8_ABSENT;
    for (int first = 0; first < model->interleaved; first++) {
        int e = 2 * F8_ABSENT;
        for (int k = first; k < count; k += model->interleaved) e = exponent[k] > e ? exponent[k] : e;
        double sum = 0;
        for (int k = first; k < count; k += model->interleaved)
            sum += e < F8_ABSENT / 2 ? product[k] : trunc(product[k] * power_of_two(model->aligned_fraction_bits - e));
        sums[first] = e < F8_ABSENT / 2 ? sum : sum / power_of_two(model->aligned_fraction_bits - e);
        e_max = e > e_max ? e : e_max;
    }
    *largest = e_max;
    double dot = 0;
    for (int first = 0; first < model->interleaved; first++)
        dot += e_max < F8_ABSENT / 2 ? sums[first]
                                     : floor(sums[first] * power_of_two(model->aligned_fraction_bits - e_max));
    return e_max < F8_ABSENT / 2 ? dot : dot / power_of_two(model->aligned_fraction_bits - e_max);
}

/* [CHIP-6] The sum of the products and the accumulator, each floored to its own unit. */
static double floored_total(const f8_model *model, double dot, int e_dot, double start, int e_start) {
    int e_max = e_dot > e_start ? e_dot : e_start;
    if (e_max < F8_ABSENT / 2) return dot + start; /* zeros, or no numbers */
    if (model->accumulator_reach >= 0 && e_start < e_max - model->accumulator_reach && isfinite(start)) start = 0;
    double to_units = power_of_two(model->fraction_bits - e_max);
    double start_to_units = power_of_two(model->accumulator_fraction_bits - e_max);
    return floor(dot * to_units) / to_units + floor(start * start_to_units) / start_to_units;
}

/* [ACC-5] The sum cut, or [CHIP-4] rounded, to 1 + result_fraction_bits significant bits, in float32's range. */
static float normalised(const f8_model *model, double total) {
    if (isnan(total)) return f8_float(0x7FFFFFFF);
    if (isinf(total)) return (float)total;
    if (total == 0) return 0;
    int exponent = exponent_of(total);
    double to_places = power_of_two(model->result_fraction_bits - (exponent < -126 ? -126 : exponent));
    double places = total * to_places;
    double result = (model->nearest_even ? nearbyint(places) : trunc(places)) / to_places + 0.0; /* never -0 */
    return fabs(result) > 0x1.fffffep127 ? f8_float(result < 0 ? 0xFF800000 : 0x7F800000) : (float)result;
}

float f8_step(const f8_model *model, float accumulator, const float *a, const float *b, const int32_t *exponent,
              int count, int shift) {
    if (isnan(accumulator)) return f8_float(0x7FFFFFFF);
    double product[F8_LONGEST_STEP], total;
    /* [OP-2] The products are exact and not normalised. */
    double scale = power_of_two(shift);
    for (int k = 0; k < count; k++) product[k] = (double)a[k] * b[k] * scale;
    /* [BF16-1], [MX-3] The exponent of zero is that of an accumulator: any other has a larger one. */
    int e_start = accumulator == 0 && model->zero_exponent ? model->zero_exponent : F8_ABSENT;
    if (accumulator != 0 && !isinf(accumulator)) {
        int exponent_of_start = exponent_of(accumulator);
        e_start = exponent_of_start < -126 ? -126 : exponent_of_start;
    }
    if (model->interleaved) {
        int e_dot;
        double dot = floored_dot(model, product, exponent, count, &e_dot);
        total = floored_total(model, dot, e_dot, accumulator, e_start);
    } else {
        int e_max = e_start; /* [ACC-2] */
        for (int k = 0; k < count; k++) e_max = exponent[k] > e_max ? exponent[k] : e_max;
        /* [ACC-3] Every term is cut toward zero to a multiple of one unit. [ACC-4] The cut terms are added exactly.
           [SPEC-1] What is not finite is added as IEEE 754 adds it. */
        double to_units = power_of_two(e_max < F8_ABSENT / 2 ? 0 : model->aligned_fraction_bits - e_max);
        total = trunc(accumulator * to_units);
        for (int k = 0; k < count; k++) total += trunc(product[k] * to_units);
        total /= to_units;
    }
    return normalised(model, total);
}
