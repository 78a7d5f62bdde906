/* Sums of hazards over cells, in the block's units. Included once per instruction set. */

INLINE uint64_t LEVEL(sum_cells)(const scheme *type, const uint8_t *cells, size_t count, uint32_t cell_bytes)
{
    uint64_t sum = 0;
    for (size_t n = 0; n < count; n++)
        sum += type->hazards[class_of(load_cell(cells + n * cell_bytes, cell_bytes), type)];
    return sum;
}

#if SIMD_LEVEL == 2

typedef struct {
    __m512i low, high, first, mask, shift, even, fields;
} LEVEL(lookup);

INLINE LEVEL(lookup) LEVEL(open_lookup)(const scheme *type)
{
    uint8_t low[16], high[16], even[64], fields[64];
    for (int n = 0; n < 16; n++) {
        low[n] = (uint8_t)type->hazards[n];
        high[n] = (uint8_t)(type->hazards[n] >> 8);
    }
    for (int n = 0; n < 64; n++) {
        even[n] = (uint8_t)(2 * n);
        fields[n] = (uint8_t)(16 * (n & 3) + type->exponent_shift);
    }
    uint32_t first = type->first_exponent < 255 ? type->first_exponent : 255;
    return (LEVEL(lookup)){
        _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)low)),
        _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)high)),
        _mm512_set1_epi8((char)first),
        _mm512_set1_epi8((char)type->exponent_mask),
        _mm512_set1_epi16((short)type->exponent_shift),
        _mm512_loadu_si512(even),
        _mm512_loadu_si512(fields),
    };
}

/* Classes of the cells that `live` has bits for; other cells are not read. */
INLINE __m512i LEVEL(classes)(const LEVEL(lookup) *table, const uint8_t *cells, uint64_t live, uint32_t cell_bytes)
{
    __m512i exponents;
    if (cell_bytes == 2) {
        __m512i left = _mm512_maskz_loadu_epi16((__mmask32)live, cells);
        __m512i right = _mm512_maskz_loadu_epi16((__mmask32)(live >> 32), cells + 64);
        left = _mm512_srlv_epi16(left, table->shift);
        right = _mm512_srlv_epi16(right, table->shift);
        exponents = _mm512_permutex2var_epi8(left, table->even, right);
    } else {
        exponents = _mm512_srlv_epi16(_mm512_maskz_loadu_epi8(live, cells), table->shift);
    }
    exponents = _mm512_and_si512(exponents, table->mask);
    return _mm512_min_epu8(_mm512_subs_epu8(exponents, table->first), _mm512_set1_epi8(CLASSES - 1));
}

/* Classes of 64 cells in any order, which is all that a sum wants. */
INLINE __m512i LEVEL(shuffled_classes)(const LEVEL(lookup) *table, const uint8_t *cells, uint32_t cell_bytes)
{
    if (cell_bytes == 1)
        return LEVEL(classes)(table, cells, UINT64_MAX, cell_bytes);
    __m512i exponents = _mm512_multishift_epi64_epi8(table->fields, _mm512_loadu_si512(cells));
    exponents = _mm512_mask_multishift_epi64_epi8(exponents, 0xF0F0F0F0F0F0F0F0u, table->fields,
                                                  _mm512_loadu_si512(cells + 64));
    exponents = _mm512_and_si512(exponents, table->mask);
    return _mm512_min_epu8(_mm512_subs_epu8(exponents, table->first), _mm512_set1_epi8(CLASSES - 1));
}

/* Eight sums of eight cells each, over the cells that `live` has bits for. */
INLINE __m512i LEVEL(eighths)(const LEVEL(lookup) *table, __m512i classes, uint64_t live)
{
    __m512i low = _mm512_sad_epu8(_mm512_maskz_shuffle_epi8(live, table->low, classes), _mm512_setzero_si512());
    __m512i high = _mm512_sad_epu8(_mm512_maskz_shuffle_epi8(live, table->high, classes), _mm512_setzero_si512());
    return _mm512_add_epi64(low, _mm512_slli_epi64(high, 8));
}

/* Lane n of the result is the sum of all lanes of sums[n]. */
INLINE __m512i LEVEL(totals)(const __m512i sums[8])
{
    __m512i pairs[4], fours[2];
    for (int n = 0; n < 4; n++)
        pairs[n] = _mm512_add_epi64(_mm512_unpacklo_epi64(sums[2 * n], sums[2 * n + 1]),
                                    _mm512_unpackhi_epi64(sums[2 * n], sums[2 * n + 1]));
    for (int n = 0; n < 2; n++)
        fours[n] = _mm512_add_epi64(_mm512_shuffle_i64x2(pairs[2 * n], pairs[2 * n + 1], 0x88),
                                    _mm512_shuffle_i64x2(pairs[2 * n], pairs[2 * n + 1], 0xDD));
    return _mm512_add_epi64(_mm512_shuffle_i64x2(fours[0], fours[1], 0x88),
                            _mm512_shuffle_i64x2(fours[0], fours[1], 0xDD));
}

INLINE uint64_t LEVEL(sum_group)(const LEVEL(lookup) *table, const scheme *type, const uint8_t *cells, size_t count,
                                 size_t readable, uint32_t cell_bytes)
{
    (void)readable;
    if (cell_bytes > 2)
        return LEVEL(sum_cells)(type, cells, count, cell_bytes);
    uint64_t live = count < GROUP_CELLS ? ((uint64_t)1 << count) - 1 : UINT64_MAX;
    __m512i classes = LEVEL(classes)(table, cells, live, cell_bytes);
    return (uint64_t)_mm512_reduce_add_epi64(LEVEL(eighths)(table, classes, live));
}

#elif SIMD_LEVEL == 1

typedef struct {
    __m256i low, high, first, mask;
    __m128i shift;
} LEVEL(lookup);

static const uint8_t LEVEL(window)[96] = {
    [0 ... 31] = 255, /* followed by zeros */
};

INLINE LEVEL(lookup) LEVEL(open_lookup)(const scheme *type)
{
    uint8_t low[16], high[16];
    for (int n = 0; n < 16; n++) {
        low[n] = (uint8_t)type->hazards[n];
        high[n] = (uint8_t)(type->hazards[n] >> 8);
    }
    uint32_t first = type->first_exponent < 255 ? type->first_exponent : 255;
    return (LEVEL(lookup)){
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)low)),
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)high)),
        _mm256_set1_epi8((char)first),
        _mm256_set1_epi8((char)type->exponent_mask),
        _mm_cvtsi32_si128((int)type->exponent_shift),
    };
}

/* Low and high bytes of the hazards of the first `count` of 32 cells, all of which are read. */
INLINE void LEVEL(hazard_bytes)(const LEVEL(lookup) *table, const uint8_t *cells, size_t count, __m256i *low,
                                __m256i *high, uint32_t cell_bytes)
{
    __m256i exponents;
    if (cell_bytes == 2) {
        __m256i left = _mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)cells), table->shift);
        __m256i right = _mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)(cells + 32)), table->shift);
        left = _mm256_and_si256(left, _mm256_set1_epi16(255));
        right = _mm256_and_si256(right, _mm256_set1_epi16(255));
        exponents = _mm256_permute4x64_epi64(_mm256_packus_epi16(left, right), 0xD8);
    } else {
        exponents = _mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)cells), table->shift);
    }
    exponents = _mm256_and_si256(exponents, table->mask);
    __m256i classes = _mm256_min_epu8(_mm256_subs_epu8(exponents, table->first), _mm256_set1_epi8(CLASSES - 1));
    __m256i live = _mm256_loadu_si256((const __m256i *)(LEVEL(window) + 32 - count));
    *low = _mm256_and_si256(_mm256_shuffle_epi8(table->low, classes), live);
    *high = _mm256_and_si256(_mm256_shuffle_epi8(table->high, classes), live);
}

/* Four sums of eight hazards each. */
INLINE __m256i LEVEL(quarters)(__m256i low, __m256i high)
{
    low = _mm256_sad_epu8(low, _mm256_setzero_si256());
    high = _mm256_sad_epu8(high, _mm256_setzero_si256());
    return _mm256_add_epi64(low, _mm256_slli_epi64(high, 8));
}

INLINE uint64_t LEVEL(sum_group)(const LEVEL(lookup) *table, const scheme *type, const uint8_t *cells, size_t count,
                                 size_t readable, uint32_t cell_bytes)
{
    if (cell_bytes > 2 || readable < GROUP_CELLS)
        return LEVEL(sum_cells)(type, cells, count, cell_bytes);
    size_t left = count < 32 ? count : 32, right = count - left;
    __m256i low, high, low_right, high_right;
    LEVEL(hazard_bytes)(table, cells, left, &low, &high, cell_bytes);
    LEVEL(hazard_bytes)(table, cells + 32 * cell_bytes, right, &low_right, &high_right, cell_bytes);
    __m256i sums = _mm256_add_epi64(LEVEL(quarters)(low, high), LEVEL(quarters)(low_right, high_right));
    __m128i halves = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return (uint64_t)_mm_cvtsi128_si64(_mm_add_epi64(halves, _mm_unpackhi_epi64(halves, halves)));
}

#else

typedef struct {
    char unused;
} LEVEL(lookup);

INLINE LEVEL(lookup) LEVEL(open_lookup)(const scheme *type)
{
    (void)type;
    return (LEVEL(lookup)){0};
}

INLINE uint64_t LEVEL(sum_group)(const LEVEL(lookup) *table, const scheme *type, const uint8_t *cells, size_t count,
                                 size_t readable, uint32_t cell_bytes)
{
    (void)table, (void)readable;
    return LEVEL(sum_cells)(type, cells, count, cell_bytes);
}

#endif

/* Clocks before each group of a chunk and after the last, from `clock` on: one more than there are groups. */
INLINE void LEVEL(group_clocks)(const LEVEL(lookup) *table, const scheme *type, const uint8_t *cells, size_t count,
                                uint64_t clock, uint64_t *clocks, uint32_t cell_bytes)
{
    size_t group = 0;
#if SIMD_LEVEL == 2
    if (cell_bytes <= 2)
        for (; (group + 8) * GROUP_CELLS <= count; group += 8) {
            __m512i sums[8];
            for (size_t n = 0; n < 8; n++) {
                const uint8_t *at = cells + (group + n) * GROUP_CELLS * cell_bytes;
                sums[n] = LEVEL(eighths)(table, LEVEL(shuffled_classes)(table, at, cell_bytes), UINT64_MAX);
            }
            uint64_t totals[8];
            _mm512_storeu_si512(totals, LEVEL(totals)(sums));
            for (size_t n = 0; n < 8; n++) {
                clocks[group + n] = clock;
                clock += totals[n];
            }
        }
#endif
    for (; group * GROUP_CELLS < count; group++) {
        size_t left = count - group * GROUP_CELLS, size = left < GROUP_CELLS ? left : GROUP_CELLS;
        clocks[group] = clock;
        clock += LEVEL(sum_group)(table, type, cells + group * GROUP_CELLS * cell_bytes, size, left, cell_bytes);
    }
    clocks[group] = clock;
}
