/* Comparing blocks and coding the positions of changes. Included once per instruction set. */

/* Where 64 bytes of cells differ: one bit per cell, which LEVEL(lane) turns into the cell's number. */
#if SIMD_LEVEL == 2
INLINE uint64_t LEVEL(differences)(const uint8_t *old_cells, const uint8_t *new_cells, uint32_t cell_bytes)
{
    __m512i old = _mm512_loadu_si512(old_cells), new = _mm512_loadu_si512(new_cells);
    switch (cell_bytes) {
    case 1:
        return _mm512_cmpneq_epi8_mask(old, new);
    case 2:
        return _mm512_cmpneq_epi16_mask(old, new);
    case 4:
        return _mm512_cmpneq_epi32_mask(old, new);
    default:
        return _mm512_cmpneq_epi64_mask(old, new);
    }
}

INLINE size_t LEVEL(lane)(uint64_t differences, uint32_t cell_bytes)
{
    (void)cell_bytes;
    return (size_t)__builtin_ctzll(differences);
}
#elif SIMD_LEVEL == 1
INLINE uint32_t LEVEL(equal_half)(const uint8_t *old_cells, const uint8_t *new_cells, uint32_t cell_bytes)
{
    __m256i old = _mm256_loadu_si256((const __m256i *)old_cells);
    __m256i new = _mm256_loadu_si256((const __m256i *)new_cells);
    switch (cell_bytes) {
    case 1:
        return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(old, new));
    case 2:
        return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi16(old, new));
    case 4:
        return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi32(old, new));
    default:
        return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi64(old, new));
    }
}

INLINE uint64_t LEVEL(differences)(const uint8_t *old_cells, const uint8_t *new_cells, uint32_t cell_bytes)
{
    uint64_t equal = LEVEL(equal_half)(old_cells, new_cells, cell_bytes) |
                     (uint64_t)LEVEL(equal_half)(old_cells + 32, new_cells + 32, cell_bytes) << 32;
    return ~equal & UINT64_MAX / ((UINT64_C(1) << cell_bytes) - 1);
}

INLINE size_t LEVEL(lane)(uint64_t differences, uint32_t cell_bytes)
{
    return (size_t)__builtin_ctzll(differences) / cell_bytes;
}
#else
INLINE uint64_t LEVEL(differences)(const uint8_t *old_cells, const uint8_t *new_cells, uint32_t cell_bytes)
{
    uint64_t differing = 0, lanes = 0;
    for (size_t at = 0; at < 64; at += 8)
        differing |= load_cell(old_cells + at, 8) ^ load_cell(new_cells + at, 8);
    if (!differing)
        return 0;
    for (size_t n = 0; n < 64 / cell_bytes; n++)
        lanes |= (uint64_t)(load_cell(old_cells + n * cell_bytes, cell_bytes) !=
                            load_cell(new_cells + n * cell_bytes, cell_bytes))
                 << n;
    return lanes;
}

INLINE size_t LEVEL(lane)(uint64_t differences, uint32_t cell_bytes)
{
    (void)cell_bytes;
    return (size_t)__builtin_ctzll(differences);
}
#endif

/* Appends the changes among `count` cells, the first of which is cell number `first`. There is room for all. */
INLINE void LEVEL(scan_chunk)(const uint8_t *old_cells, const uint8_t *new_cells, size_t count, size_t first,
                              change_list *changes, uint32_t cell_bytes)
{
    size_t bytes = count * cell_bytes, at = 0, found = changes->count;
    while (bytes - at >= 64) {
        size_t left = (bytes - at) / 64, lines = left < 64 ? left : 64;
        uint64_t differing[64], hits = 0;
        for (size_t line = 0; line < lines; line++) {
            differing[line] = LEVEL(differences)(old_cells + at + 64 * line, new_cells + at + 64 * line, cell_bytes);
            hits |= (uint64_t)(differing[line] != 0) << line;
        }
        while (hits) {
            size_t line = (size_t)__builtin_ctzll(hits);
            uint64_t lanes = differing[line];
            hits &= hits - 1;
            do {
                size_t cell = (at + 64 * line) / cell_bytes + LEVEL(lane)(lanes, cell_bytes);
                append_change(changes, found++, old_cells, new_cells, cell, first, cell_bytes);
                lanes &= lanes - 1;
            } while (lanes);
        }
        at += 64 * lines;
    }
    for (size_t cell = at / cell_bytes; cell < count; cell++)
        if (load_cell(old_cells + cell * cell_bytes, cell_bytes) != load_cell(new_cells + cell * cell_bytes, cell_bytes))
            append_change(changes, found++, old_cells, new_cells, cell, first, cell_bytes);
    changes->count = found;
}

/* Codes the changes at `positions`, all of them among `count` cells, the first of which is cell number `first`.
 * The clock of `coder` is the sum of hazards before that cell and is moved behind the last. */
INLINE outcome LEVEL(encode_chunk)(const LEVEL(lookup) *table, position_coder *coder, const uint8_t *cells, size_t count,
                                   size_t first, const uint32_t *positions, size_t changed, uint32_t cell_bytes)
{
    const scheme *type = coder->type;
    uint64_t clocks[SCAN_CELLS / GROUP_CELLS + 1];
    range_encoder local = coder->stream; /* nothing can alias these: they stay in registers */
    clock_state state = coder->state;
    outcome result = DONE;
    LEVEL(group_clocks)(table, type, cells, count, coder->clock, clocks, cell_bytes);
    coder->clock = clocks[(count + GROUP_CELLS - 1) / GROUP_CELLS];
    for (size_t n = 0; n < changed && result == DONE; n++) {
        size_t cell = positions[n] - first, group = cell / GROUP_CELLS;
        const uint8_t *at = cells + group * GROUP_CELLS * cell_bytes;
        uint64_t start = clocks[group] + LEVEL(sum_group)(table, type, at, cell % GROUP_CELLS,
                                                          count - group * GROUP_CELLS, cell_bytes);
        uint64_t hazard = type->hazards[class_of(load_cell(cells + cell * cell_bytes, cell_bytes), type)];
        result = encode_change(&local, &state, start, hazard);
    }
    coder->stream = local;
    coder->state = state;
    return result;
}

INLINE outcome LEVEL(encode_even)(const scheme *type, size_t first, const uint32_t *positions, size_t changed,
                                  clock_state *state, range_encoder *coder)
{
    range_encoder local = *coder;
    uint64_t hazard = type->hazards[0];
    outcome result = DONE;
    for (size_t n = 0; n < changed && result == DONE; n++)
        result = encode_change(&local, state, (positions[n] - first) * hazard, hazard);
    *coder = local;
    return result;
}

/* Codes the changes of a run of cells, at most SCAN_CELLS long, that starts with cell number `first`. */
INLINE outcome LEVEL(encode_run)(const LEVEL(lookup) *table, position_coder *coder, const uint8_t *cells, size_t count,
                                 size_t first, const uint32_t *positions, size_t changed, uint32_t cell_bytes)
{
    const scheme *type = coder->type;
    coder->changed += changed;
    if (type->classes == 1)
        return LEVEL(encode_even)(type, coder->start, positions, changed, &coder->state, &coder->stream);
    return LEVEL(encode_chunk)(table, coder, cells, count, first, positions, changed, cell_bytes);
}

/* One pass over both blocks; with a `coder`, codes the positions as long as `changes` has room for them. */
INLINE outcome LEVEL(scan_cells)(const block *old_cells, const block *new_cells, position_coder *coder,
                                 change_list *changes, uint32_t cell_bytes)
{
    LEVEL(lookup) table = coder ? LEVEL(open_lookup)(coder->type) : (LEVEL(lookup)){0};
    cursor old = open_cursor(old_cells, cell_bytes), new = open_cursor(new_cells, cell_bytes);
    for (size_t first = 0, count; first < old_cells->cells; first += count) {
        size_t before = changes->count;
        outcome result = DONE;
        count = smaller(smaller(cursor_run(&old), cursor_run(&new)), SCAN_CELLS);
        if (coder && !meet_half(coder, first, &count))
            return NO_MEMORY;
        if (changes->capacity >= before + count) {
            LEVEL(scan_chunk)(old.at, new.at, count, first, changes, cell_bytes);
            if (coder)
                result = LEVEL(encode_run)(&table, coder, old.at, count, first, changes->positions + before,
                                           changes->count - before, cell_bytes);
        } else {
            changes->capacity = 0;
            changes->count += count_differences(old.at, new.at, count, cell_bytes);
        }
        if (result != DONE)
            return result;
        cursor_skip(&old, count);
        cursor_skip(&new, count);
    }
    return DONE;
}

INLINE outcome LEVEL(encode_cells)(const block *cells, position_coder *coder, const uint32_t *positions,
                                   size_t changed, uint32_t cell_bytes)
{
    LEVEL(lookup) table = LEVEL(open_lookup)(coder->type);
    cursor at = open_cursor(cells, cell_bytes);
    for (size_t first = 0, done = 0, count; first < cells->cells; first += count) {
        size_t found = 0;
        count = smaller(cursor_run(&at), SCAN_CELLS);
        if (!meet_half(coder, first, &count))
            return NO_MEMORY;
        while (done + found < changed && positions[done + found] < first + count)
            found++;
        outcome result = LEVEL(encode_run)(&table, coder, at.at, count, first, positions + done, found, cell_bytes);
        if (result != DONE)
            return result;
        cursor_skip(&at, count);
        done += found;
    }
    return DONE;
}

static outcome LEVEL(scan)(const block *old_cells, const block *new_cells, uint32_t cell_bytes, position_coder *coder,
                           change_list *changes)
{
    switch (cell_bytes) {
    case 1:
        return LEVEL(scan_cells)(old_cells, new_cells, coder, changes, 1);
    case 2:
        return LEVEL(scan_cells)(old_cells, new_cells, coder, changes, 2);
    case 4:
        return LEVEL(scan_cells)(old_cells, new_cells, coder, changes, 4);
    default:
        return LEVEL(scan_cells)(old_cells, new_cells, coder, changes, 8);
    }
}

static outcome LEVEL(encode)(const block *cells, position_coder *coder, const uint32_t *positions, size_t changed)
{
    switch (coder->type->cell_bytes) {
    case 1:
        return LEVEL(encode_cells)(cells, coder, positions, changed, 1);
    case 2:
        return LEVEL(encode_cells)(cells, coder, positions, changed, 2);
    case 4:
        return LEVEL(encode_cells)(cells, coder, positions, changed, 4);
    default:
        return LEVEL(encode_cells)(cells, coder, positions, changed, 8);
    }
}
