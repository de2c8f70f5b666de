/* SGLang's hash of a tensor on a GPU, whose loop is hash.h on every width, and what it hashes of blocks. */
#include "width.h"

uint64_t f8_hash(const uint8_t *bytes, int64_t words, uint32_t first, uint32_t bytes_of_all, int width) {
    return f8_width_at(width)->hash(bytes, words, first, bytes_of_all);
}

void f8_products(const uint8_t *codes, int64_t rows, int64_t columns, const uint16_t *tables, uint16_t *products) {
    const int64_t size = 128; /* of a block, in both directions */
    for (int64_t row = 0; row < rows; row += size)
        for (int64_t column = 0; column < columns; column += size, tables += 256)
            for (int64_t i = row; i < f8_smaller(row + size, rows); i++)
                for (int64_t j = column; j < f8_smaller(column + size, columns); j++)
                    products[i * columns + j] = tables[codes[i * columns + j]];
}
