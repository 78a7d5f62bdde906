/* Included once per instruction set: plain loops that compilers vectorise. */

/* Adds the terms of `count` words; `offsets` are keyed index terms. */
INLINE void LEVEL(add_terms)(const uint32_t key[4], const uint32_t *offsets, const uint32_t *words, size_t count,
                             uint64_t sums[2])
{
    uint64_t low = 0, high = 0;
    for (size_t n = 0; n < count; n++) {
        uint32_t a = offsets[n];
        a ^= a >> 15;
        uint32_t b = (words[n] + a) * MIX_VALUE;
        b ^= b >> 16;
        a = (a + b) * MIX_SECOND;
        a ^= a >> 15;
        uint32_t c = (a ^ key[1]) * MIX_THIRD;
        c ^= c >> 16;
        low += (uint64_t)a * (b ^ key[2]);
        high += (uint64_t)c * (b + key[3]);
    }
    sums[0] += low;
    sums[1] += high;
}

INLINE void LEVEL(range_words)(const uint32_t key[4], uint64_t start, const uint8_t *cells, size_t count,
                               uint64_t sums[2], uint32_t word_bytes)
{
    uint32_t offsets[BATCH], words[BATCH];
    for (size_t at = 0; at < count;) {
        uint64_t first = start + at, left_of_high = ((uint64_t)1 << 32) - (uint32_t)first;
        size_t size = count - at < BATCH ? count - at : BATCH;
        size = size < left_of_high ? size : (size_t)left_of_high;
        uint32_t base = (uint32_t)first * MIX_INDEX + key[0] + (uint32_t)(first >> 32) * MIX_HIGH;
        for (size_t n = 0; n < size; n++)
            offsets[n] = base + (uint32_t)n * MIX_INDEX;
        for (size_t n = 0; n < size; n++)
            words[n] = (uint32_t)load_cell(cells + (at + n) * word_bytes, word_bytes);
        LEVEL(add_terms)(key, offsets, words, size, sums);
        at += size;
    }
}

static void LEVEL(range)(const uint32_t key[4], uint64_t start, const uint8_t *cells, size_t count,
                         uint32_t cell_bytes, uint64_t sums[2])
{
    switch (cell_bytes) {
    case 1:
        LEVEL(range_words)(key, start, cells, count, sums, 1);
        break;
    case 2:
        LEVEL(range_words)(key, start, cells, count, sums, 2);
        break;
    case 4:
        LEVEL(range_words)(key, start, cells, count, sums, 4);
        break;
    default:
        LEVEL(range_words)(key, 2 * start, cells, 2 * count, sums, 4);
    }
}

/* Word `part` of every cell; `parts` words make a cell. */
INLINE void LEVEL(words_at)(const uint32_t key[4], const uint64_t *indices, const uint8_t *cells, size_t count,
                            uint64_t sums[2], uint32_t cell_bytes, uint32_t parts, uint32_t part)
{
    uint32_t offsets[BATCH], words[BATCH];
    for (size_t at = 0; at < count; at += BATCH) {
        size_t size = count - at < BATCH ? count - at : BATCH;
        for (size_t n = 0; n < size; n++) {
            uint64_t index = indices[at + n] * parts + part;
            offsets[n] = (uint32_t)index * MIX_INDEX + key[0] + (uint32_t)(index >> 32) * MIX_HIGH;
        }
        for (size_t n = 0; n < size; n++)
            words[n] = (uint32_t)(load_cell(cells + (at + n) * cell_bytes, cell_bytes) >> (32 * part));
        LEVEL(add_terms)(key, offsets, words, size, sums);
    }
}

static void LEVEL(at)(const uint32_t key[4], const uint64_t *indices, const uint8_t *cells, size_t count,
                      uint32_t cell_bytes, uint64_t sums[2])
{
    switch (cell_bytes) {
    case 1:
        LEVEL(words_at)(key, indices, cells, count, sums, 1, 1, 0);
        break;
    case 2:
        LEVEL(words_at)(key, indices, cells, count, sums, 2, 1, 0);
        break;
    case 4:
        LEVEL(words_at)(key, indices, cells, count, sums, 4, 1, 0);
        break;
    default:
        LEVEL(words_at)(key, indices, cells, count, sums, 8, 2, 0);
        LEVEL(words_at)(key, indices, cells, count, sums, 8, 2, 1);
    }
}
