/* SGLang's hash of a tensor on a GPU; its loop is hash.h, on every width. */
#include "width.h"

uint64_t f8_hash(const uint8_t *bytes, int64_t words, uint32_t first, uint32_t bytes_of_all, int width) {
    return f8_width_at(width)->hash(bytes, words, first, bytes_of_all);
}
