/* Finding the cells that a stream of positions means. Included once per instruction set. */

#if SIMD_LEVEL == 2
INLINE uint64_t first_quad(__m512i lanes)
{
    return (uint64_t)_mm_cvtsi128_si64(_mm512_castsi512_si128(lanes));
}

INLINE uint32_t first_word(__m256i lanes)
{
    return (uint32_t)_mm_cvtsi128_si32(_mm256_castsi256_si128(lanes));
}
#endif

/* The cell among 64, the first `count` of which exist, in whose hazard the clock passes `target`, counted
 * from the first of them; all of them together pass it. Sets the sums before and after that cell. */
INLINE size_t LEVEL(find_in_group)(const LEVEL(lookup) *table, const scheme *type, const uint8_t *cells, size_t count,
                                   uint64_t target, uint64_t *start, uint64_t *end, uint32_t cell_bytes)
{
#if SIMD_LEVEL == 2
    if (cell_bytes <= 2) {
        uint64_t live = _bzhi_u64(UINT64_MAX, (unsigned)count);
        __m512i classes = LEVEL(classes)(table, cells, live, cell_bytes), zero = _mm512_setzero_si512();
        __m512i low = _mm512_maskz_shuffle_epi8(live, table->low, classes);
        __m512i high = _mm512_maskz_shuffle_epi8(live, table->high, classes);
        __m512i sums = _mm512_slli_epi64(_mm512_sad_epu8(high, zero), 8);
        sums = _mm512_add_epi64(sums, _mm512_sad_epu8(low, zero));
        sums = _mm512_add_epi64(sums, _mm512_alignr_epi64(sums, zero, 7));
        sums = _mm512_add_epi64(sums, _mm512_alignr_epi64(sums, zero, 6));
        sums = _mm512_add_epi64(sums, _mm512_alignr_epi64(sums, zero, 4));
        __mmask8 passed = _mm512_cmple_epu64_mask(sums, _mm512_set1_epi64((long long)target));
        unsigned eighth = (unsigned)__builtin_popcount(passed);
        __m512i which = _mm512_set1_epi64(eighth);
        uint64_t before = first_quad(_mm512_permutexvar_epi64(which, _mm512_alignr_epi64(sums, zero, 7)));
        __m128i pairs = _mm_unpacklo_epi8(_mm512_castsi512_si128(_mm512_permutexvar_epi64(which, low)),
                                          _mm512_castsi512_si128(_mm512_permutexvar_epi64(which, high)));
        __m256i hazards = _mm256_cvtepu16_epi32(pairs), clocks = hazards;
        clocks = _mm256_add_epi32(clocks, _mm256_slli_si256(clocks, 4));
        clocks = _mm256_add_epi32(clocks, _mm256_slli_si256(clocks, 8));
        clocks = _mm256_add_epi32(clocks, _mm256_maskz_permutexvar_epi32(0xF0, _mm256_set1_epi32(3), clocks));
        __mmask8 within = _mm256_cmple_epu32_mask(clocks, _mm256_set1_epi32((int)(target - before)));
        unsigned lane = (unsigned)__builtin_popcount(within);
        __m256i at = _mm256_set1_epi32((int)lane);
        *end = before + first_word(_mm256_permutexvar_epi32(at, clocks));
        *start = *end - first_word(_mm256_permutexvar_epi32(at, hazards));
        return 8 * eighth + lane;
    }
#endif
    (void)table;
    uint64_t clock = 0;
    for (size_t n = 0;; n++) {
        uint64_t hazard = type->hazards[class_of(load_cell(cells + n * cell_bytes, cell_bytes), type)];
        if (clock + hazard > target || n + 1 == count) {
            *start = clock;
            *end = clock + hazard;
            return n;
        }
        clock += hazard;
    }
}

/* A half being decoded: the chunk of cells it is at, and the clocks at the chunk's groups. */
typedef struct {
    cursor at;
    size_t first, count, end; /* of the chunk, and the end of the half */
    size_t group;             /* where the last change was */
    uint64_t chunk_end, last; /* clock at the end of the chunk, and at most at that of the half */
    clock_state state;
    range_decoder coder;
    uint64_t clocks[CHUNK_GROUPS + 8]; /* find_group reads eight at once */
} LEVEL(walk);

static void LEVEL(open_walk)(LEVEL(walk) *walk, const block *cells, const scheme *type, const position_half *half,
                             uint32_t cell_bytes)
{
    walk->at = open_cursor(cells, cell_bytes);
    for (size_t left = half->first, run; left; left -= run) {
        run = smaller(left, cursor_run(&walk->at));
        cursor_skip(&walk->at, run);
    }
    walk->first = half->first;
    walk->end = half->end;
    walk->count = walk->group = 0;
    walk->chunk_end = 0;
    walk->last = (uint64_t)(half->end - half->first) * UINT16_MAX;
    walk->state = open_clock(type);
    walk->coder = half->coder;
}

/* Goes on to the next chunk; false at the end of the half. */
static bool LEVEL(next_chunk)(LEVEL(walk) *walk, const LEVEL(lookup) *table, const scheme *type, uint32_t cell_bytes)
{
    cursor_skip(&walk->at, walk->count);
    walk->first += walk->count;
    walk->count = smaller(smaller(cursor_run(&walk->at), CHUNK_CELLS), walk->end - walk->first);
    walk->group = 0;
    LEVEL(group_clocks)(table, type, walk->at.at, walk->count, walk->chunk_end, walk->clocks, cell_bytes);
    size_t groups = (walk->count + GROUP_CELLS - 1) / GROUP_CELLS;
    walk->chunk_end = walk->clocks[groups];
    for (size_t n = groups + 1; n < groups + 8; n++)
        walk->clocks[n] = UINT64_MAX;
    return walk->count > 0;
}

/* The first group from `group` on after which the clock has passed `target`; there is one. */
INLINE size_t LEVEL(find_group)(const uint64_t *clocks, size_t group, uint64_t target)
{
#if SIMD_LEVEL == 2
    for (;; group += 8) {
        __m512i ends = _mm512_loadu_si512(clocks + group + 1);
        __mmask8 passed = _mm512_cmpgt_epu64_mask(ends, _mm512_set1_epi64((long long)target));
        if (__builtin_expect(passed != 0, 1))
            return group + (size_t)__builtin_ctz(passed);
    }
#else
    while (clocks[group + 1] <= target)
        group++;
    return group;
#endif
}

/* The next change of a walk. */
INLINE outcome LEVEL(decode_next)(LEVEL(walk) *walk, const LEVEL(lookup) *table, const scheme *type,
                                  uint32_t *position, uint8_t *old_cell, uint32_t cell_bytes)
{
    outcome result = decode_rounds(&walk->coder, &walk->state, walk->last);
    if (result != DONE)
        return result;
    uint64_t target = walk->state.base + clock_ahead(&walk->coder, &walk->state), start, end;
    for (;; target = end) {
        while (__builtin_expect(walk->chunk_end <= target, 0))
            if (!LEVEL(next_chunk)(walk, table, type, cell_bytes))
                return BEYOND_BLOCK;
        size_t group = walk->group = LEVEL(find_group)(walk->clocks, walk->group, target);
        size_t first = group * GROUP_CELLS;
        const uint8_t *at = walk->at.at + first * cell_bytes;
        uint64_t before = walk->clocks[group];
        size_t cell = LEVEL(find_in_group)(table, type, at, smaller(walk->count - first, GROUP_CELLS), target - before,
                                           &start, &end, cell_bytes);
        end += before;
        if (__builtin_expect(decode_change(&walk->coder, &walk->state, start + before, end), 1)) {
            *position = (uint32_t)(walk->first + first + cell);
            memcpy(old_cell, at + cell * cell_bytes, cell_bytes);
            return DONE;
        }
    }
}

/* Both halves by turns: what one waits for, the other uses. */
INLINE outcome LEVEL(decode_cells)(const block *cells, const scheme *type, const position_half halves[2],
                                   uint32_t *positions, uint8_t *old_cells, uint32_t cell_bytes)
{
    LEVEL(lookup) table = LEVEL(open_lookup)(type);
    LEVEL(walk) left, right;
    LEVEL(open_walk)(&left, cells, type, &halves[0], cell_bytes);
    LEVEL(open_walk)(&right, cells, type, &halves[1], cell_bytes);
    size_t middle = halves[0].changed, both = smaller(middle, halves[1].changed), total = middle + halves[1].changed;
    outcome result = DONE, other = DONE;
    for (size_t n = 0; n < both && result == DONE && other == DONE; n++) {
        size_t m = middle + n;
        result = LEVEL(decode_next)(&left, &table, type, positions + n, old_cells + n * cell_bytes, cell_bytes);
        other = LEVEL(decode_next)(&right, &table, type, positions + m, old_cells + m * cell_bytes, cell_bytes);
    }
    for (size_t n = both; n < middle && result == DONE; n++)
        result = LEVEL(decode_next)(&left, &table, type, positions + n, old_cells + n * cell_bytes, cell_bytes);
    for (size_t m = middle + both; m < total && other == DONE; m++)
        other = LEVEL(decode_next)(&right, &table, type, positions + m, old_cells + m * cell_bytes, cell_bytes);
    if (result != DONE || other != DONE)
        return result != DONE ? result : other;
    return decoder_ended(&left.coder) && decoder_ended(&right.coder) ? DONE : WRONG_LENGTH;
}

static outcome LEVEL(decode)(const block *cells, const scheme *type, const position_half halves[2],
                             uint32_t *positions, uint8_t *old_cells)
{
    switch (type->cell_bytes) {
    case 1:
        return LEVEL(decode_cells)(cells, type, halves, positions, old_cells, 1);
    case 2:
        return LEVEL(decode_cells)(cells, type, halves, positions, old_cells, 2);
    case 4:
        return LEVEL(decode_cells)(cells, type, halves, positions, old_cells, 4);
    default:
        return LEVEL(decode_cells)(cells, type, halves, positions, old_cells, 8);
    }
}
