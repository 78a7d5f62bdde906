/* Counting, gathering and scattering cells. */
#include "cursor.h"

enum { TALLY_AHEAD = 4 }; /* groups of runs */
enum { MOVE_AHEAD = 128 }; /* changes; into the second-level cache, which waits for more lines at once */

INLINE void count_run(const uint8_t *cells, size_t count, const scheme *type, uint64_t *counts, uint32_t cell_bytes)
{
    for (size_t n = 0; n < count; n++)
        counts[exponent_of(load_cell(cells + n * cell_bytes, cell_bytes), type)]++;
}

void count_exponents(const uint8_t *cells, size_t count, const scheme *type, uint64_t *counts)
{
    FOR_CELL_BYTES(type->cell_bytes, count_run, cells, count, type, counts)
}

/* Counts of a tally by old exponent: the four tables of cells spare equal neighbours from waiting for each other. */
typedef struct {
    uint32_t cells[4][MOST_EXPONENTS], changed[MOST_EXPONENTS];
} tally_counts;

/* Counts a word at a time; words in which nothing changed are left alone. */
INLINE void tally_run(const uint8_t *old_cells, const uint8_t *new_cells, size_t count, const scheme *type,
                      tally_counts *counts, uint32_t cell_bytes)
{
    size_t word_cells = sizeof(uint64_t) / cell_bytes, whole = count - count % word_cells;
    for (size_t n = 0; n < whole; n += word_cells) {
        uint64_t word = load_cell(old_cells + n * cell_bytes, sizeof word);
        uint64_t differing = word ^ load_cell(new_cells + n * cell_bytes, sizeof word);
        for (size_t k = 0; k < word_cells; k++)
            counts->cells[k & 3][exponent_of(word >> 8 * cell_bytes * k, type)]++;
        for (size_t k = 0; differing && k < word_cells; k++)
            if (differing >> 8 * cell_bytes * k & widest(cell_bytes))
                counts->changed[exponent_of(word >> 8 * cell_bytes * k, type)]++;
    }
    for (size_t n = whole; n < count; n++) {
        uint64_t old = load_cell(old_cells + n * cell_bytes, cell_bytes);
        counts->cells[0][exponent_of(old, type)]++;
        counts->changed[exponent_of(old, type)] += old != load_cell(new_cells + n * cell_bytes, cell_bytes);
    }
}

/* First cell of the run that a tally takes from a group of 2**stride_log2 runs. */
INLINE size_t sampled_cell(uint64_t group, unsigned stride_log2)
{
    uint64_t taken = (uint32_t)(group * SAMPLE_SCATTER) >> 16 >> (16 - stride_log2);
    return (size_t)(((group << stride_log2) + taken) * SAMPLE_CELLS);
}

INLINE void prefetch_run(const cursor *at, size_t ahead)
{
    if (ahead + SAMPLE_CELLS <= cursor_run(at))
        for (size_t byte = 0; byte < SAMPLE_CELLS * at->cell_bytes; byte += 64)
            __builtin_prefetch(at->at + ahead * at->cell_bytes + byte);
}

/* Counts sampled runs; the blocks' pieces may be cut anywhere. */
void tally(const block *old_cells, const block *new_cells, const scheme *type, unsigned stride_log2, uint64_t *cells,
           uint64_t *changed)
{
    cursor old = open_cursor(old_cells, type->cell_bytes), new = open_cursor(new_cells, type->cell_bytes);
    size_t position = 0, total = old_cells->cells, exponents = type->exponent_mask + 1;
    tally_counts counts;
    for (size_t table = 0; table < 4; table++)
        memset(counts.cells[table], 0, exponents * sizeof(uint32_t));
    memset(counts.changed, 0, exponents * sizeof(uint32_t));
    for (uint64_t group = 0; position < total; group++) {
        size_t from = smaller(sampled_cell(group, stride_log2), total), to = smaller(from + SAMPLE_CELLS, total);
        size_t next = smaller((size_t)((group + 1) << stride_log2) * SAMPLE_CELLS, total);
        size_t ahead = sampled_cell(group + TALLY_AHEAD, stride_log2) - position;
        prefetch_run(&old, ahead);
        prefetch_run(&new, ahead);
        while (position < next) {
            size_t stop = position < from ? from : position < to ? to : next;
            size_t count = smaller(smaller(cursor_run(&old), cursor_run(&new)), stop - position);
            if (position >= from && position < to) {
                FOR_CELL_BYTES(type->cell_bytes, tally_run, old.at, new.at, count, type, &counts)
            }
            cursor_skip(&old, count);
            cursor_skip(&new, count);
            position += count;
        }
    }
    for (size_t exponent = 0; exponent < exponents; exponent++) {
        for (size_t table = 0; table < 4; table++)
            cells[exponent] += counts.cells[table][exponent];
        changed[exponent] += counts.changed[exponent];
    }
}

/* Copies cells between their places in a block and an array, one entry per position. */
INLINE void move_cells(const block *cells, const uint32_t *positions, uint8_t *values, size_t count, bool to_block,
                       uint32_t cell_bytes)
{
    size_t first = 0, done = 0;
    for (size_t number = 0; number < cells->count && done < count; number++) {
        piece run = cells->pieces[number];
        size_t end = first + run.cells;
        for (; done < count && positions[done] < end; done++) {
            size_t ahead = done + MOVE_AHEAD;
            if (ahead < count && positions[ahead] < end)
                __builtin_prefetch(run.data + (positions[ahead] - first) * cell_bytes, 1, 2);
            uint8_t *place = run.data + (positions[done] - first) * cell_bytes, *value = values + done * cell_bytes;
            memcpy(to_block ? place : value, to_block ? value : place, cell_bytes);
        }
        first = end;
    }
}

void gather(const block *cells, uint32_t cell_bytes, const uint32_t *positions, size_t count, uint8_t *values)
{
    FOR_CELL_BYTES(cell_bytes, move_cells, cells, positions, values, count, false)
}

outcome apply_changes(const block *dest, uint32_t cell_bytes, const uint32_t *positions, const uint8_t *values,
                      size_t count)
{
    if (!are_ascending(positions, count, dest->cells))
        return BAD_POSITIONS;
    FOR_CELL_BYTES(cell_bytes, move_cells, dest, positions, (uint8_t *)values, count, true)
    return DONE;
}

bool are_ascending(const uint32_t *positions, size_t count, size_t cells)
{
    bool ascending = true;
    for (size_t n = 1; n < count; n++)
        ascending &= positions[n - 1] < positions[n];
    return ascending && (!count || positions[count - 1] < cells);
}
