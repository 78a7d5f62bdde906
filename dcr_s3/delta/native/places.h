/* Places of cells in memory that stays where it is: found once, then written, read and compared by several threads. */
#ifndef DCR_PLACES_H
#define DCR_PLACES_H

#include "kernels.h"

/* From change `first` on, offsets count cells from `base`. */
typedef struct {
    uint8_t *base;
    size_t first;
} window;

typedef struct {
    uint32_t *offsets; /* one per place, and some more that only prefetching reads */
    window *windows;
    size_t window_count;
    size_t count;
    uint32_t cell_bytes;
} places;

/* `positions` must be strictly ascending cells of the block; its memory must outlive the places. */
outcome open_places(const block *cells, uint32_t cell_bytes, const int64_t *positions, size_t count, places *result);
void close_places(places *at);

/* `values` has one cell per place. At most `threads` threads run, the caller's among them. */
void put_cells(const places *at, const uint8_t *values, unsigned threads);
void take_cells(const places *at, uint8_t *values, unsigned threads);

/* Number of the first place whose cell is not that of `values`; their count where there is none. */
size_t first_other(const places *at, const uint8_t *values, unsigned threads);

#endif
