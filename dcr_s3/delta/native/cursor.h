/* A place in a block's cells, walked forward piece by piece. */
#ifndef DCR_CURSOR_H
#define DCR_CURSOR_H

#include "cells.h"

enum { LINE_BYTES = 64 };

typedef struct {
    const block *cells;
    size_t number; /* of the piece */
    size_t offset; /* cells into it */
    uint8_t *at;   /* address of the cell, where there is one */
    uint32_t cell_bytes;
} cursor;

INLINE size_t smaller(size_t left, size_t right)
{
    return left < right ? left : right;
}

/* Cells from here to the end of the piece; 0 only at the end of the block. */
INLINE size_t cursor_run(const cursor *at)
{
    return at->number < at->cells->count ? at->cells->pieces[at->number].cells - at->offset : 0;
}

/* Moves on by `cells`, at most the length of the run, and over empty pieces. */
INLINE void cursor_skip(cursor *at, size_t cells)
{
    at->offset += cells;
    at->at += cells * at->cell_bytes;
    while (at->number < at->cells->count && at->offset == at->cells->pieces[at->number].cells) {
        at->number++;
        at->offset = 0;
        at->at = at->number < at->cells->count ? at->cells->pieces[at->number].data : NULL;
    }
}

INLINE cursor open_cursor(const block *cells, uint32_t cell_bytes)
{
    cursor at = {cells, 0, 0, cells->count ? cells->pieces[0].data : NULL, cell_bytes};
    cursor_skip(&at, 0);
    return at;
}

/* What lies behind a chunk in memory: fetched line by line while the chunk is worked on, which hides how long it takes. */
typedef struct {
    const uint8_t *at, *end;
} lines_ahead;

/* As much again as the chunk of `cells` cells, as far as the piece goes. */
INLINE lines_ahead open_ahead(const cursor *chunk, size_t cells)
{
    const uint8_t *next = chunk->at + cells * chunk->cell_bytes;
    return (lines_ahead){next, next + smaller(cells, cursor_run(chunk) - cells) * chunk->cell_bytes};
}

INLINE void fetch_lines(lines_ahead *ahead, size_t lines)
{
    for (; lines && ahead->at < ahead->end; lines--, ahead->at += LINE_BYTES)
        __builtin_prefetch(ahead->at, 0, 2);
}

#endif
