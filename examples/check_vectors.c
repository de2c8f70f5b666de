/* Checks casts and GEMMs of `f8emu vectors OUT`, from reference/NUMERICS.md alone, whose ids stand at the lines:
       cc -O2 -std=c11 -o check_vectors check_vectors.c -lm; cat OUT/casts-* OUT/gemms-* | ./check_vectors */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { const char *name; int digits, fraction_bits, bias; uint32_t sign, largest; } format;
static const format formats[] = {{"float8_e4m3fn", 2, 3, 7, 0x80, 0x7e}, {"float8_e5m2", 2, 2, 15, 0x80, 0x7b},
                                 {"float16", 4, 10, 15, 0x8000, 0x7bff}, {"bfloat16", 4, 7, 127, 0x8000, 0x7f7f},
                                 {"float32", 8, 23, 127, 0x80000000, 0x7f7fffff}, {"", 0, 0, 0, 0, 0}};
typedef struct { uint32_t code; int exponent; double value; } number;
enum { M, N, K, STEP, ALIGNED, RESULT, PROMOTE, SLICE, SCALING, OF_A, OF_B, OF_D, A, B, SCALE_A, SCALE_B, BIAS, C, D };
static char line[1 << 20], *field[32]; /* a line, and its columns */
static int size[SCALING];              /* the columns before SCALING */

static const format *format_of(const char *name) {
    const format *f = formats;
    while (*f->name && strcmp(f->name, name)) f++;
    return f;
}

static number decoded(const char *hex, const format *f, int index) { /* [OP-1] */
    char word[9] = {0};
    uint32_t code = (uint32_t)strtoul(memcpy(word, hex + index * f->digits, (size_t)f->digits), NULL, 16);
    uint32_t magnitude = code & (f->sign - 1), raw = magnitude >> f->fraction_bits;
    int exponent = (raw ? (int)raw : 1) - f->bias;
    double value = ldexp(magnitude - (raw ? (raw - 1) << f->fraction_bits : 0), exponent - f->fraction_bits);
    if (magnitude > f->largest) value = magnitude > f->largest + 1 || magnitude == f->sign - 1 ? NAN : INFINITY;
    return (number){code, exponent, code & f->sign ? -value : value};
}

static uint32_t encoded(float value, const format *f, int saturates) { /* [CAST-1] to [CAST-4], [EPI-4] */
    union { float value; uint32_t code; } x = {value};
    uint32_t magnitude = x.code & 0x7fffffff, raw = magnitude >> 23 ? magnitude >> 23 : 1;
    int above = (int)raw - 127 - (1 - f->bias), dropped = 23 - f->fraction_bits - (above < 0 ? above : 0);
    uint64_t significand = magnitude - ((raw - 1) << 23), unit = UINT64_C(1) << (dropped < 40 ? dropped : 40);
    uint64_t count = significand / unit, twice_the_rest = 2 * (significand % unit);
    count += twice_the_rest > unit || (twice_the_rest == unit && count % 2); /* to nearest even */
    uint64_t code = count + ((uint64_t)(above > 0 ? above : 0) << f->fraction_bits);
    if (code > f->largest || magnitude >= 0x7f800000) code = saturates ? f->largest : f->largest + 1;
    if (code == f->sign - 1 || magnitude > 0x7f800000) return f->sign - 1; /* NaN, without a sign */
    return (uint32_t)code | (x.code >> 31 ? f->sign : 0);
}

static float step(int m, int n, int first, int end, float accumulator) {
    const format *of_a = format_of(field[OF_A]), *of_b = format_of(field[OF_B]);
    double terms[65] = {accumulator}, sum = 0;
    int count = 1, largest = accumulator == 0 ? -1000 : (int)fmax(ilogb(accumulator), -126);
    for (int k = first; k < end; k++) {
        number a = decoded(field[A], of_a, m * size[K] + k), b = decoded(field[B], of_b, n * size[K] + k);
        double product = terms[count++] = a.value * b.value;                                      /* [OP-2] */
        if (product != 0 && a.exponent + b.exponent > largest) largest = a.exponent + b.exponent; /* [ACC-2] */
    }
    int aligned = size[ALIGNED] - largest;
    for (int i = 0; i < count; i++) sum += trunc(ldexp(terms[i], aligned)); /* [ACC-3], [ACC-4]: exact */
    if (sum == 0 || !isfinite(sum)) return (float)sum;                      /* [SPEC-1] */
    int unit = (int)fmax(ilogb(sum) - aligned, -126) - size[RESULT];
    return (float)ldexp(trunc(ldexp(sum, -aligned - unit)), unit); /* [ACC-5] */
}

static float output(int m, int n, const format *out) {
    const format *float32 = format_of("float32");
    float total = 0, partial = 0, accumulator = *field[C] == '-' ? 0 : (float)decoded(field[C], out, 0).value;
    for (int first = 0, end; first < size[K]; first = end) {
        end = first + size[STEP] < size[K] ? first + size[STEP] : size[K]; /* [ACC-1] */
        accumulator = step(m, n, first, end, accumulator);
        int ends_slice = end == size[K] || end % size[SLICE] == 0, promotes = size[PROMOTE] && end % size[PROMOTE] == 0;
        if (promotes || ends_slice) partial += accumulator, accumulator = 0; /* [CHAIN-2] */
        if (ends_slice) total += partial, partial = 0;                       /* [CHAIN-3] */
    }
    float a = (float)decoded(field[SCALE_A], float32, *field[SCALING] == 't' ? 0 : m).value;
    float b = (float)decoded(field[SCALE_B], float32, *field[SCALING] == 't' ? 0 : n).value;
    if (*field[SCALING] == 't') total *= a * b, total += 0; /* tensorwise [EPI-1] */
    if (*field[SCALING] == 'r') total = total * b * a;      /* rowwise [EPI-2] */
    if (*field[SCALING] == 'g') total = total * a * b;      /* grouped [EPI-6] */
    return *field[BIAS] == '-' ? total : total + (float)decoded(field[BIAS], float32, n).value; /* [EPI-3] */
}

int main(void) {
    char source[16], target[16];
    int casts = 0, outputs = 0, skipped = 0, equal = 1;
    for (int number = 1, columns = 0; fgets(line, sizeof line, stdin); number++, columns = 0) {
        if (sscanf(line, "# cast: %15s to %15s", source, target) > 0 || *line == '#') continue;
        for (char *word = strtok(line, " \n"); word; word = strtok(NULL, " \n")) field[columns++] = word;
        for (int i = 0; i < SCALING && i < columns; i++) size[i] = atoi(field[i]);
        int is_cast = !strncmp(field[columns - 1], "CAST", 4);
        const format *to = format_of(is_cast ? target : columns > D ? field[OF_D] : "");
        if (!*to->name || strstr(field[columns - 1], "CHIP") || strstr(field[columns - 1], "EPI-5")) skipped++;
        else if (is_cast) {
            float x = (float)decoded(field[0], format_of(source), 0).value;
            for (int i = 0; i < 2; i++, casts++) equal &= encoded(x, to, i == 0) == decoded(field[i + 1], to, 0).code;
        } else
            for (int i = 0; i < size[M] * size[N]; i++, outputs++)
                equal &= encoded(output(i / size[N], i % size[N], to), to, 0) == decoded(field[D], to, i).code;
        if (!equal) return printf("line %d: another result\n", number), 1;
    }
    return printf("equal: %d casts, %d outputs of GEMMs; %d lines need other rules\n", casts, outputs, skipped) < 0;
}
