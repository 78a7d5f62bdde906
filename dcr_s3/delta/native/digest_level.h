/* Included once per instruction set: plain loops that compilers vectorise. */

/* Adds the terms of one word, whose keyed index is `a`. */
INLINE void LEVEL(add_term)(const uint32_t key[4], uint32_t a, uint32_t word, uint64_t *low, uint64_t *high)
{
    a ^= a >> 15;
    uint32_t b = (word + a) * MIX_VALUE;
    b ^= b >> 16;
    a = (a + b) * MIX_SECOND;
    a ^= a >> 15;
    uint32_t c = (a ^ key[1]) * MIX_THIRD;
    c ^= c >> 16;
    *low += (uint64_t)a * (b ^ key[2]);
    *high += (uint64_t)c * (b + key[3]);
}

#ifdef LANES
/* The same for LANES words at once; products are taken of even and of odd lanes. */
INLINE void LEVEL(add_lanes)(const uint32_t key[4], VECTOR a, VECTOR words, VECTOR *low, VECTOR *high)
{
    a = OP(xor)(a, OP32(srli)(a, 15));
    VECTOR b = OP32(mullo)(OP32(add)(words, a), OP32(set1)((int)MIX_VALUE));
    b = OP(xor)(b, OP32(srli)(b, 16));
    a = OP32(mullo)(OP32(add)(a, b), OP32(set1)((int)MIX_SECOND));
    a = OP(xor)(a, OP32(srli)(a, 15));
    VECTOR c = OP32(mullo)(OP(xor)(a, OP32(set1)((int)key[1])), OP32(set1)((int)MIX_THIRD));
    c = OP(xor)(c, OP32(srli)(c, 16));
    VECTOR left = OP(xor)(b, OP32(set1)((int)key[2])), right = OP32(add)(b, OP32(set1)((int)key[3]));
    *low = OP64(add)(*low, OP64(add)(MULTIPLY(a, left), MULTIPLY(OP64(srli)(a, 32), OP64(srli)(left, 32))));
    *high = OP64(add)(*high, OP64(add)(MULTIPLY(c, right), MULTIPLY(OP64(srli)(c, 32), OP64(srli)(right, 32))));
}

INLINE VECTOR LEVEL(load_words)(const uint8_t *at, uint32_t word_bytes)
{
    return word_bytes == 1 ? LOAD_BYTES(at) : word_bytes == 2 ? LOAD_SHORTS(at) : LOAD_WORDS(at);
}

/* Adds the terms of as many words as fill whole vectors, and returns how many those are. */
INLINE size_t LEVEL(range_lanes)(const uint32_t key[4], uint32_t keyed, const uint8_t *cells, size_t count,
                                 uint64_t sums[2], uint32_t word_bytes)
{
    uint32_t offsets[LANES];
    uint64_t totals[2][LANES / 2];
    for (uint32_t lane = 0; lane < LANES; lane++)
        offsets[lane] = keyed + lane * MIX_INDEX;
    VECTOR a = LOAD_WORDS(offsets), step = OP32(set1)((int)(LANES * MIX_INDEX)), low = ZERO, high = ZERO;
    size_t done = 0;
    for (; done + LANES <= count; done += LANES, a = OP32(add)(a, step))
        LEVEL(add_lanes)(key, a, LEVEL(load_words)(cells + done * word_bytes, word_bytes), &low, &high);
    memcpy(totals[0], &low, sizeof low);
    memcpy(totals[1], &high, sizeof high);
    for (size_t lane = 0; lane < LANES / 2; lane++) {
        sums[0] += totals[0][lane];
        sums[1] += totals[1][lane];
    }
    return done;
}
#endif

INLINE void LEVEL(range_words)(const uint32_t key[4], uint64_t start, const uint8_t *cells, size_t count,
                               uint64_t sums[2], uint32_t word_bytes)
{
    for (size_t at = 0; at < count;) {
        uint64_t first = start + at, low = 0, high = 0, left_of_high = ((uint64_t)1 << 32) - (uint32_t)first;
        size_t size = count - at < left_of_high ? count - at : (size_t)left_of_high, n = 0;
        uint32_t keyed = (uint32_t)first * MIX_INDEX + key[0] + (uint32_t)(first >> 32) * MIX_HIGH;
#ifdef LANES
        n = LEVEL(range_lanes)(key, keyed, cells + at * word_bytes, size, sums, word_bytes);
#endif
        for (; n < size; n++)
            LEVEL(add_term)(key, keyed + (uint32_t)n * MIX_INDEX,
                            (uint32_t)load_cell(cells + (at + n) * word_bytes, word_bytes), &low, &high);
        sums[0] += low;
        sums[1] += high;
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
    uint64_t low = 0, high = 0;
    for (size_t n = 0; n < count; n++) {
        uint64_t index = indices[n] * parts + part;
        uint32_t keyed = (uint32_t)index * MIX_INDEX + key[0] + (uint32_t)(index >> 32) * MIX_HIGH;
        LEVEL(add_term)(key, keyed, (uint32_t)(load_cell(cells + n * cell_bytes, cell_bytes) >> (32 * part)), &low,
                        &high);
    }
    sums[0] += low;
    sums[1] += high;
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
