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
    {"float32", 8, 23, 127, 0x80000000, 0x7f7fffff}, {"", 0, 0, 0, 0, 0}}, *const float32 = &formats[4];
typedef struct { uint32_t code; int exponent; double value; } number;
enum { M, N, K, STEP, ALIGNED, RESULT, PROMOTE, SLICE, SCALING, OF_A, OF_B, OF_D, A, B, SCALE_A, SCALE_B, BIAS, C, D };
static char line[9 << 17], *field[32], *last, from[16], into[16]; /* a line, its columns; the formats of a cast */
static int size[SCALING], malformed;                              /* the columns before SCALING; a fault of the line */

static const format *format_of(const char *name) {
    for (const format *f = formats;; f++)
        if (!*f->name || !strcmp(f->name, name)) return f;
}

static number decoded(const char *hex, const format *f, int index) { /* [OP-1] */
    const char *word = memcpy((char[9]){0}, hex + index * f->digits, (size_t)f->digits);
    malformed |= !*word || strspn(word, "0123456789abcdef") != (size_t)f->digits;
    uint32_t code = strtoul(word, NULL, 16), magnitude = code & (f->sign - 1), raw = magnitude >> f->fraction_bits;
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
    float total = 0, partial = 0, accumulator = *field[C] == '-' ? 0 : (float)decoded(field[C], out, 0).value;
    for (int first = 0, end; first < size[K]; first = end) {
        end = first + size[STEP] < size[K] ? first + size[STEP] : size[K]; /* [ACC-1] */
        accumulator = step(m, n, first, end, accumulator);
        int ends_slice = end == size[K] || end % size[SLICE] == 0, promotes = size[PROMOTE] && end % size[PROMOTE] == 0;
        if (promotes || ends_slice) partial += accumulator, accumulator = 0; /* [CHAIN-2] */
        if (ends_slice) total += partial, partial = 0;                       /* [CHAIN-3] */
    }
    if (*field[SCALING] == 'n') return total;
    float a = (float)decoded(field[SCALE_A], float32, *field[SCALING] == 't' ? 0 : m).value;
    float b = (float)decoded(field[SCALE_B], float32, *field[SCALING] == 't' ? 0 : n).value;
    if (*field[SCALING] == 't') total *= a * b, total += 0; /* tensorwise [EPI-1] */
    if (*field[SCALING] == 'r') total = total * b * a;      /* rowwise [EPI-2] */
    if (*field[SCALING] == 'g') total = total * a * b;      /* grouped [EPI-6] */
    return *field[BIAS] == '-' ? total : total + (float)decoded(field[BIAS], float32, n).value; /* [EPI-3] */
}

int main(void) {
    int casts = 0, outputs = 0, skipped = 0, expected = 0, equal = 1;
    for (int number = 1, columns = 0; fgets(line, 1 << 20, stdin); number++, columns = 0) {
        sscanf(line, "# cast: %15s to %15s", from, into);
        for (char *w = strtok(line, " "); w && columns < 32; w = strtok(NULL, " ")) field[columns++] = last = w;
        if (*line == '#' && columns > 1 && !strcmp(field[1], "columns:")) expected = columns - 2;
        if (*line == '#') continue;
        malformed = columns < 4 || columns != expected || !strchr(last, '\n');
        for (int i = 0; i < SCALING && columns > D && !malformed; i++)
            malformed = (size[i] = atoi(field[i])) < (i != PROMOTE) || size[i] > (i == STEP ? 64 : 9999);
        const format *to = format_of(malformed ? "" : columns > D ? field[OF_D] : strncmp(last, "CAST", 4) ? "" : into);
        if (!*to->name || strstr(last, "CHIP") || strstr(last, "EPI-5")) skipped++;
        else if (columns > D) for (int i = 0; !malformed && i < size[M] * size[N]; i++, outputs++)
            equal &= encoded(output(i / size[N], i % size[N], to), to, 0) == decoded(field[D], to, i).code;
        else for (int i = 0; i < 2; i++, casts++)
            equal &= encoded(decoded(field[0], format_of(from), 0).value, to, !i) == decoded(field[i + 1], to, 0).code;
        if (malformed || !equal) return printf("line %d: %s\n", number, malformed ? "malformed" : "another result"), 1;
    }
    if (!casts && !outputs) return printf("nothing was checked; %d lines need other rules\n", skipped), 1;
    return printf("equal: %d casts, %d outputs of GEMMs; %d lines need other rules\n", casts, outputs, skipped) < 0;
}
