/* Finding the cells that a stream of positions means. Included once per instruction set. */

#if SIMD_LEVEL == 1
INLINE uint32_t first_word(__m256i lanes)
{
    return (uint32_t)_mm_cvtsi128_si32(_mm256_castsi256_si128(lanes));
}
#elif SIMD_LEVEL == 2
INLINE uint64_t first_quad(__m512i lanes)
{
    return (uint64_t)_mm_cvtsi128_si64(_mm512_castsi512_si128(lanes));
}
#endif

/* The cell among `count`, at most 64, in whose hazard the clock passes `target`, counted from the first of them; all of
 * them together pass it. Sets the sums before and after that cell. First the eighth of them that passes, then the cell. */
#if SIMD_LEVEL == 2
INLINE size_t LEVEL(find_lane)(const LEVEL(lookup) *table, const uint8_t *cells, size_t count, uint64_t target,
                                uint64_t *start, uint64_t *end, uint32_t cell_bytes)
{
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
#elif SIMD_LEVEL == 1
INLINE size_t LEVEL(find_lane)(const LEVEL(lookup) *table, const uint8_t *cells, size_t count, uint64_t target,
                                uint64_t *start, uint64_t *end, uint32_t cell_bytes)
{
    (void)count;
    uint8_t low[GROUP_CELLS], high[GROUP_CELLS];
    uint64_t eighths[8], before[9] = {0};
    for (size_t half = 0; half < 2; half++) {
        __m256i low_bytes, high_bytes;
        LEVEL(hazard_bytes)(table, cells + 32 * half * cell_bytes, 32, &low_bytes, &high_bytes, cell_bytes);
        _mm256_storeu_si256((__m256i *)(low + 32 * half), low_bytes);
        _mm256_storeu_si256((__m256i *)(high + 32 * half), high_bytes);
        _mm256_storeu_si256((__m256i *)(eighths + 4 * half), LEVEL(quarters)(low_bytes, high_bytes));
    }
    size_t eighth = 0;
    for (size_t n = 0; n < 8; n++) {
        before[n + 1] = before[n] + eighths[n];
        eighth += before[n + 1] <= target;
    }
    __m256i hazards = _mm256_cvtepu16_epi32(_mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)(low + 8 * eighth)),
                                                              _mm_loadl_epi64((const __m128i *)(high + 8 * eighth))));
    __m256i clocks = _mm256_add_epi32(hazards, _mm256_slli_si256(hazards, 4));
    clocks = _mm256_add_epi32(clocks, _mm256_slli_si256(clocks, 8));
    __m256i carry = _mm256_permutevar8x32_epi32(clocks, _mm256_set1_epi32(3));
    clocks = _mm256_add_epi32(clocks, _mm256_blend_epi32(_mm256_setzero_si256(), carry, 0xF0));
    __m256i passed = _mm256_cmpgt_epi32(clocks, _mm256_set1_epi32((int)(target - before[eighth])));
    unsigned lane = (unsigned)__builtin_ctz((unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(passed)));
    __m256i at = _mm256_set1_epi32((int)lane);
    *end = before[eighth] + first_word(_mm256_permutevar8x32_epi32(clocks, at));
    *start = *end - first_word(_mm256_permutevar8x32_epi32(hazards, at));
    return 8 * eighth + lane;
}
#endif

INLINE size_t LEVEL(find_in_group)(const LEVEL(lookup) *table, const scheme *type, const uint8_t *cells, size_t count,
                                   uint64_t target, uint64_t *start, uint64_t *end, uint32_t cell_bytes)
{
#if SIMD_LEVEL > 0
    if (cell_bytes <= 2 && (SIMD_LEVEL == 2 || count == GROUP_CELLS))
        return LEVEL(find_lane)(table, cells, count, target, start, end, cell_bytes);
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
    lines_ahead ahead;
    size_t lines_each; /* fetched ahead with every change */
    uint64_t clocks[CHUNK_GROUPS + 8]; /* find_group reads eight at once */
} LEVEL(walk);

static void LEVEL(open_walk)(LEVEL(walk) *walk, const block *cells, const position_half *half, uint32_t cell_bytes)
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
    walk->ahead = (lines_ahead){NULL, NULL};
    walk->lines_each = (half->end - half->first) * cell_bytes / LINE_BYTES / (half->changed + 1) + 1;
    walk->lines_each = smaller(walk->lines_each, MOST_LINES_AHEAD);
}

/* Goes on to the next chunk; false at the end of the half. */
static bool LEVEL(next_chunk)(LEVEL(walk) *walk, const LEVEL(lookup) *table, const scheme *type, uint32_t cell_bytes)
{
    cursor_skip(&walk->at, walk->count);
    walk->first += walk->count;
    walk->count = smaller(smaller(cursor_run(&walk->at), CHUNK_CELLS), walk->end - walk->first);
    walk->group = 0;
    if (!walk->count)
        return false;
    walk->ahead = open_ahead(&walk->at, walk->count);
    LEVEL(group_clocks)(table, type, walk->at.at, walk->count, walk->chunk_end, walk->clocks, cell_bytes);
    size_t groups = (walk->count + GROUP_CELLS - 1) / GROUP_CELLS;
    walk->chunk_end = walk->clocks[groups];
    for (size_t n = groups + 1; n < groups + 8; n++)
        walk->clocks[n] = UINT64_MAX;
    return true;
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
    for (;; group += 8) {
        size_t passed = 0;
        for (size_t n = 1; n <= 8; n++)
            passed += clocks[group + n] <= target;
        if (__builtin_expect(passed < 8, 1))
            return group + passed;
    }
#endif
}

/* Goes to the chunk in which the clock passes `target`. */
INLINE outcome LEVEL(reach)(LEVEL(walk) *walk, uint64_t target, const LEVEL(lookup) *table, const scheme *type,
                            uint32_t cell_bytes)
{
    while (__builtin_expect(walk->chunk_end <= target, 0))
        if (!LEVEL(next_chunk)(walk, table, type, cell_bytes))
            return BEYOND_BLOCK;
    return DONE;
}

/* Reads from the stream up to where the clock runs until the next change, and goes to that chunk. */
INLINE outcome LEVEL(aim)(LEVEL(walk) *walk, range_decoder *coder, clock_state *state, const LEVEL(lookup) *table,
                          const scheme *type, uint64_t *target, uint32_t cell_bytes)
{
    outcome result = decode_rounds(coder, state, walk->last);
    if (result != DONE)
        return result;
    *target = state->base + clock_ahead(coder, state);
    return LEVEL(reach)(walk, *target, table, type, cell_bytes);
}

/* A cell of the chunk, and the sums of hazards before and after it. */
typedef struct {
    size_t cell;
    uint64_t start, end;
} LEVEL(place);

INLINE LEVEL(place) LEVEL(locate)(LEVEL(walk) *walk, uint64_t target, const LEVEL(lookup) *table, const scheme *type,
                                  uint32_t cell_bytes)
{
    fetch_lines(&walk->ahead, walk->lines_each);
    size_t group = walk->group = LEVEL(find_group)(walk->clocks, walk->group, target), first = group * GROUP_CELLS;
    uint64_t before = walk->clocks[group], start, end;
    size_t cell = LEVEL(find_in_group)(table, type, walk->at.at + first * cell_bytes,
                                       smaller(walk->count - first, GROUP_CELLS), target - before, &start, &end,
                                       cell_bytes);
    return (LEVEL(place)){first + cell, before + start, before + end};
}

/* Takes the change at `place`, or at a cell close behind it where the aim was short, and writes it down as number n. */
INLINE outcome LEVEL(settle)(LEVEL(walk) *walk, range_decoder *coder, clock_state *state, const LEVEL(lookup) *table,
                             const scheme *type, LEVEL(place) place, uint32_t *positions, uint8_t *old_cells, size_t n,
                             uint32_t cell_bytes)
{
    while (__builtin_expect(!decode_change(coder, state, place.start, place.end), 0)) {
        outcome result = LEVEL(reach)(walk, place.end, table, type, cell_bytes);
        if (result != DONE)
            return result;
        place = LEVEL(locate)(walk, place.end, table, type, cell_bytes);
    }
    positions[n] = (uint32_t)(walk->first + place.cell);
    memcpy(old_cells + n * cell_bytes, walk->at.at + place.cell * cell_bytes, cell_bytes);
    return DONE;
}

/* What is left of one half. */
INLINE outcome LEVEL(decode_rest)(LEVEL(walk) *walk, range_decoder *coder, clock_state *state,
                                  const LEVEL(lookup) *table, const scheme *type, uint32_t *positions,
                                  uint8_t *old_cells, size_t from, size_t to, uint32_t cell_bytes)
{
    for (size_t n = from; n < to; n++) {
        uint64_t target;
        outcome result = LEVEL(aim)(walk, coder, state, table, type, &target, cell_bytes);
        if (result == DONE)
            result = LEVEL(settle)(walk, coder, state, table, type,
                                   LEVEL(locate)(walk, target, table, type, cell_bytes), positions, old_cells, n,
                                   cell_bytes);
        if (result != DONE)
            return result;
    }
    return decoder_ended(coder) ? DONE : WRONG_LENGTH;
}

/* Both halves step by step: while one waits for a result, the other computes. */
INLINE outcome LEVEL(decode_cells)(const block *cells, const scheme *type, const position_half halves[2],
                                   uint32_t *positions, uint8_t *old_cells, uint32_t cell_bytes)
{
    LEVEL(lookup) table = LEVEL(open_lookup)(type);
    LEVEL(walk) one, two;
    LEVEL(open_walk)(&one, cells, &halves[0], cell_bytes);
    LEVEL(open_walk)(&two, cells, &halves[1], cell_bytes);
    range_decoder coder = halves[0].coder, coder_two = halves[1].coder;
    clock_state state = open_clock(type), state_two = state;
    size_t middle = halves[0].changed, pairs = smaller(middle, halves[1].changed);
    outcome result = DONE;
    for (size_t n = 0; n < pairs; n++) {
        uint64_t target, target_two;
        if ((result = LEVEL(aim)(&one, &coder, &state, &table, type, &target, cell_bytes)) != DONE ||
            (result = LEVEL(aim)(&two, &coder_two, &state_two, &table, type, &target_two, cell_bytes)) != DONE)
            return result;
        LEVEL(place) place = LEVEL(locate)(&one, target, &table, type, cell_bytes);
        LEVEL(place) place_two = LEVEL(locate)(&two, target_two, &table, type, cell_bytes);
        if ((result = LEVEL(settle)(&one, &coder, &state, &table, type, place, positions, old_cells, n,
                                    cell_bytes)) != DONE ||
            (result = LEVEL(settle)(&two, &coder_two, &state_two, &table, type, place_two, positions, old_cells,
                                    middle + n, cell_bytes)) != DONE)
            return result;
    }
    result = LEVEL(decode_rest)(&one, &coder, &state, &table, type, positions, old_cells, pairs, middle, cell_bytes);
    if (result != DONE)
        return result;
    return LEVEL(decode_rest)(&two, &coder_two, &state_two, &table, type, positions, old_cells, middle + pairs,
                              middle + halves[1].changed, cell_bytes);
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
