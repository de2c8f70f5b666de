/* What SGLang hashes of a tensor on a GPU, which a compiler turns into vectors of the width that includes this. */
#include "width.h"

enum { HASH_TILE = 8192 }; /* words */

/* fmix32 of MurmurHash3. */
static inline uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 16) * 0x85EBCA6B;
    x = (x ^ x >> 13) * 0xC2B2AE35;
    return x ^ x >> 16;
}

static inline uint32_t rotated(uint32_t x, int by) { return x << by | x >> (32 - by); }

/* The sum over tiles, the last of which may be shorter. A word is mixed with its index twice, for either half of the
   sum, and what a tile sums to with the number of all bytes. */
static uint64_t hash(const uint8_t *bytes, int64_t words, uint32_t first, uint32_t bytes_of_all) {
    const uint32_t seed = 0x243F6A88, other_seed = (seed * 0x9E3779B1) ^ 0xDEADBEEF;
    uint64_t sum = 0;
    for (int64_t begin = 0; begin < words; begin += HASH_TILE) {
        int64_t end = f8_smaller(begin + HASH_TILE, words);
        uint32_t high = 0, low = 0;
        for (int64_t i = begin; i < end; i++) {
            uint32_t word, at = first + (uint32_t)i;
            memcpy(&word, bytes + 4 * i, 4);
            high += mixed(word ^ (at * 0x27D4EB2D + seed) ^ rotated(at, 15));
            low += mixed(word ^ (at * 0x165667B1 + other_seed) ^ rotated(at, 13));
        }
        sum += (uint64_t)mixed(high ^ bytes_of_all) << 32 | mixed(low ^ bytes_of_all);
    }
    return sum;
}
