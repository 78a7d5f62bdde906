/* Scatter, gather and compare at prepared places. Memory is what binds, so cells are asked for long before their turn,
 * and threads take short spans so that none is left waiting for a core that is busy with something else. */
#include "places.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "cells.h"

enum {
    AHEAD = 128,         /* places between asking for a cell and touching it */
    SPAN = 8192,         /* places that a thread takes at once */
    SECOND_LEVEL = 2,    /* where cells are brought: this cache waits for more of them at once than the first does */
    MOST_THREADS = 64,
    WORTH_A_THREAD = 4 * SPAN,
};

typedef enum { PUT, TAKE, COMPARE } deed;

typedef struct {
    const places *at;
    uint8_t *values;
    deed what;
    atomic_size_t next;  /* first place that nobody has taken */
    atomic_size_t other; /* first place known to hold something else */
} job;

static bool add_window(places *at, size_t *room, uint8_t *base, size_t first)
{
    if (at->window_count == *room) {
        size_t wanted = *room ? 2 * *room : 8;
        window *larger = realloc(at->windows, wanted * sizeof *larger);
        if (!larger)
            return false;
        at->windows = larger;
        *room = wanted;
    }
    at->windows[at->window_count++] = (window){base, first};
    return true;
}

/* Cells from the last window's base to `cell`; UINT64_MAX where none of its offsets leads there. */
INLINE uint64_t offset_of(const places *at, const uint8_t *cell)
{
    uintptr_t base = at->window_count ? (uintptr_t)at->windows[at->window_count - 1].base : 0, wanted = (uintptr_t)cell;
    if (!base || wanted < base || (wanted - base) % at->cell_bytes)
        return UINT64_MAX;
    return (wanted - base) / at->cell_bytes;
}

outcome open_places(const block *cells, uint32_t cell_bytes, const int64_t *positions, size_t count, places *result)
{
    places at = {.offsets = malloc((count + AHEAD) * sizeof *at.offsets), .count = count, .cell_bytes = cell_bytes};
    size_t first = 0, done = 0, room = 0;
    outcome failure = NO_MEMORY;
    if (!at.offsets)
        return NO_MEMORY;
    for (size_t number = 0; number < cells->count; number++) {
        piece run = cells->pieces[number];
        for (; done < count && (uint64_t)positions[done] < first + run.cells; done++) {
            if (done && positions[done] <= positions[done - 1]) {
                failure = BAD_POSITIONS;
                goto failed;
            }
            uint8_t *cell = run.data + ((uint64_t)positions[done] - first) * cell_bytes;
            uint64_t offset = offset_of(&at, cell);
            if (offset > UINT32_MAX) {
                if (!add_window(&at, &room, cell, done))
                    goto failed;
                offset = 0;
            }
            at.offsets[done] = (uint32_t)offset;
        }
        first += run.cells;
    }
    if (done < count) {
        failure = BAD_POSITIONS;
        goto failed;
    }
    for (size_t n = count; n < count + AHEAD; n++)
        at.offsets[n] = count ? at.offsets[count - 1] : 0;
    *result = at;
    return DONE;
failed:
    close_places(&at);
    return failure;
}

void close_places(places *at)
{
    free(at->offsets);
    free(at->windows);
    *at = (places){0};
}

/* Returns the first place in [from, to) that holds something else, or `to`. */
INLINE size_t run_window(uint8_t *base, const uint32_t *offsets, uint8_t *values, size_t from, size_t to, deed what,
                         uint32_t cell_bytes)
{
    uint64_t differs = 0;
    for (size_t n = from; n < to; n++) {
        __builtin_prefetch(base + (size_t)offsets[n + AHEAD] * cell_bytes, 0, SECOND_LEVEL);
        uint8_t *cell = base + (size_t)offsets[n] * cell_bytes, *value = values + n * cell_bytes;
        if (what == COMPARE)
            differs |= load_cell(cell, cell_bytes) ^ load_cell(value, cell_bytes);
        else
            memcpy(what == PUT ? cell : value, what == PUT ? value : cell, cell_bytes);
    }
    for (size_t n = from; differs && n < to; n++)
        if (memcmp(base + (size_t)offsets[n] * cell_bytes, values + n * cell_bytes, cell_bytes))
            return n;
    return to;
}

#define RUN_WINDOW(what) \
    FOR_CELL_BYTES(at->cell_bytes, found = run_window, at->windows[number].base, at->offsets, work->values, from, end, \
                   what)

static size_t run_span(const job *work, size_t from, size_t to)
{
    const places *at = work->at;
    size_t number = 0, above = at->window_count;
    while (above - number > 1) {
        size_t middle = number + (above - number) / 2;
        *(at->windows[middle].first <= from ? &number : &above) = middle;
    }
    for (; from < to; number++) {
        size_t next = number + 1 < at->window_count ? at->windows[number + 1].first : at->count;
        size_t end = next < to ? next : to, found = end;
        switch (work->what) {
        case PUT:
            RUN_WINDOW(PUT)
            break;
        case TAKE:
            RUN_WINDOW(TAKE)
            break;
        default:
            RUN_WINDOW(COMPARE)
        }
        if (found < end)
            return found;
        from = end;
    }
    return to;
}

static void *run_spans(void *argument)
{
    job *work = argument;
    size_t from, count = work->at->count;
    while ((from = atomic_fetch_add(&work->next, SPAN)) < count) {
        size_t to = count - from < SPAN ? count : from + SPAN, found = run_span(work, from, to);
        size_t known = atomic_load(&work->other);
        while (found < to && found < known && !atomic_compare_exchange_weak(&work->other, &known, found))
            ;
    }
    return NULL;
}

static size_t run(const places *at, uint8_t *values, deed what, unsigned threads)
{
    job work = {at, values, what, 0, at->count};
    pthread_t started[MOST_THREADS];
    size_t useful = at->count / WORTH_A_THREAD, count = 0;
    size_t wanted = threads < useful ? threads : useful;
    wanted = wanted < MOST_THREADS ? wanted : MOST_THREADS;
    while (count + 1 < wanted && !pthread_create(&started[count], NULL, run_spans, &work))
        count++;
    run_spans(&work);
    while (count)
        pthread_join(started[--count], NULL);
    return atomic_load(&work.other);
}

void put_cells(const places *at, const uint8_t *values, unsigned threads)
{
    run(at, (uint8_t *)values, PUT, threads);
}

void take_cells(const places *at, uint8_t *values, unsigned threads)
{
    run(at, values, TAKE, threads);
}

size_t first_other(const places *at, const uint8_t *values, unsigned threads)
{
    return run(at, (uint8_t *)values, COMPARE, threads);
}
