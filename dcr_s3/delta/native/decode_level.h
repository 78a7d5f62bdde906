/* Finding the cells that a stream of positions means. Included once per instruction set. */

/* The cell among 64, of which `live` has bits for those that exist, in whose hazard the clock passes `target`, counted
 * from the first of them; all of them together pass it. Sets the sums before and after that cell. */
INLINE size_t LEVEL(find_in_group)(const LEVEL(lookup) *table, const scheme *type, const uint8_t *cells, size_t count,
                                   uint64_t target, uint64_t *start, uint64_t *end, uint32_t cell_bytes)
{
#if SIMD_LEVEL == 2
    if (cell_bytes <= 2) {
        uint64_t live = count < GROUP_CELLS ? ((uint64_t)1 << count) - 1 : UINT64_MAX;
        __m512i classes = LEVEL(classes)(table, cells, live, cell_bytes);
        __m512i sums = LEVEL(eighths)(table, classes, live), zero = _mm512_setzero_si512();
        sums = _mm512_add_epi64(sums, _mm512_alignr_epi64(sums, zero, 7));
        sums = _mm512_add_epi64(sums, _mm512_alignr_epi64(sums, zero, 6));
        sums = _mm512_add_epi64(sums, _mm512_alignr_epi64(sums, zero, 4));
        __mmask8 passed = _mm512_cmple_epu64_mask(sums, _mm512_set1_epi64((long long)target));
        size_t eighth = (size_t)__builtin_popcount(passed);
        uint8_t numbers[64];
        uint64_t before[9] = {0}, clock[9];
        _mm512_storeu_si512(numbers, classes);
        _mm512_storeu_si512(before + 1, sums);
        clock[0] = before[eighth];
        size_t lane = 0;
        for (size_t n = 0; n < 8; n++) {
            clock[n + 1] = clock[n] + type->hazards[numbers[8 * eighth + n]];
            lane += clock[n + 1] <= target;
        }
        *start = clock[lane];
        *end = clock[lane + 1];
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

/* A chunk of the block being decoded, and the clocks at its groups. */
typedef struct {
    cursor at;
    size_t first, count;
    uint64_t clocks[CHUNK_GROUPS + 1];
} LEVEL(chunk);

INLINE uint64_t LEVEL(chunk_end)(const LEVEL(chunk) *chunk)
{
    return chunk->clocks[(chunk->count + GROUP_CELLS - 1) / GROUP_CELLS];
}

/* Goes on to the next chunk; false where there is none. */
static bool LEVEL(next_chunk)(LEVEL(chunk) *chunk, const LEVEL(lookup) *table, const scheme *type, uint32_t cell_bytes)
{
    uint64_t clock = LEVEL(chunk_end)(chunk);
    cursor_skip(&chunk->at, chunk->count);
    chunk->first += chunk->count;
    chunk->count = smaller(cursor_run(&chunk->at), CHUNK_CELLS);
    LEVEL(group_clocks)(table, type, chunk->at.at, chunk->count, clock, chunk->clocks, cell_bytes);
    return chunk->count > 0;
}

/* The first group from `group` on after which the clock has passed `target`. */
INLINE size_t LEVEL(find_group)(const uint64_t *clocks, size_t group, uint64_t target)
{
    while (clocks[group + 1] <= target)
        group++;
    return group;
}

INLINE outcome LEVEL(decode_cells)(const block *cells, const scheme *type, range_decoder *coder, size_t changed,
                                   uint32_t *positions, uint8_t *old_cells, uint32_t cell_bytes)
{
    LEVEL(lookup) table = LEVEL(open_lookup)(type);
    LEVEL(chunk) chunk = {.at = open_cursor(cells, cell_bytes)};
    clock_state state = open_clock(type);
    uint64_t last = (uint64_t)cells->cells * UINT16_MAX;
    size_t group = 0;
    for (size_t n = 0; n < changed; n++) {
        outcome result = decode_rounds(coder, &state, last);
        if (result != DONE)
            return result;
        uint64_t target = state.base + clock_ahead(coder, &state), start, end;
        for (;;) {
            while (LEVEL(chunk_end)(&chunk) <= target) {
                if (!LEVEL(next_chunk)(&chunk, &table, type, cell_bytes))
                    return BEYOND_BLOCK;
                group = 0;
            }
            group = LEVEL(find_group)(chunk.clocks, group, target);
            const uint8_t *at = chunk.at.at + group * GROUP_CELLS * cell_bytes;
            size_t cell = LEVEL(find_in_group)(&table, type, at, smaller(chunk.count - group * GROUP_CELLS, GROUP_CELLS),
                                               target - chunk.clocks[group], &start, &end, cell_bytes);
            start += chunk.clocks[group];
            end += chunk.clocks[group];
            if (__builtin_expect(!is_after(coder, &state, end), 1)) {
                positions[n] = (uint32_t)(chunk.first + group * GROUP_CELLS + cell);
                memcpy(old_cells + n * cell_bytes, at + cell * cell_bytes, cell_bytes);
                break;
            }
            target = end;
        }
        decode_change(coder, &state, start, end);
    }
    return decoder_ended(coder) ? DONE : WRONG_LENGTH;
}

static outcome LEVEL(decode)(const block *cells, const scheme *type, range_decoder *coder, size_t changed,
                             uint32_t *positions, uint8_t *old_cells)
{
    switch (type->cell_bytes) {
    case 1:
        return LEVEL(decode_cells)(cells, type, coder, changed, positions, old_cells, 1);
    case 2:
        return LEVEL(decode_cells)(cells, type, coder, changed, positions, old_cells, 2);
    case 4:
        return LEVEL(decode_cells)(cells, type, coder, changed, positions, old_cells, 4);
    default:
        return LEVEL(decode_cells)(cells, type, coder, changed, positions, old_cells, 8);
    }
}
