/* Scanning blocks, and coding the positions of their changes by hazard clock. */
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <math.h>

#include "clock.h"
#include "cursor.h"

uint64_t survival_table[SURVIVAL_STEPS + 1];
uint32_t log_table[LOG_STEPS + 1];

void set_survival(const uint64_t table[SURVIVAL_STEPS + 1])
{
    memcpy(survival_table, table, sizeof survival_table);
    for (int step = 0; step <= LOG_STEPS; step++)
        log_table[step] = (uint32_t)(log2(1 + (double)step / LOG_STEPS) * (1 << LOG_BITS));
}

static size_t count_differences(const uint8_t *old_cells, const uint8_t *new_cells, size_t count, uint32_t cell_bytes)
{
    size_t differing = 0;
    for (size_t n = 0; n < count; n++)
        differing += load_cell(old_cells + n * cell_bytes, cell_bytes) !=
                     load_cell(new_cells + n * cell_bytes, cell_bytes);
    return differing;
}

/* Writes down change number `number`: cell `cell` of a run that starts with cell `first` of the block. */
INLINE void append_change(change_list *changes, size_t number, const uint8_t *old_cells, const uint8_t *new_cells,
                          size_t cell, size_t first, uint32_t cell_bytes)
{
    size_t at = number * cell_bytes, from = cell * cell_bytes;
    changes->positions[number] = (uint32_t)(first + cell);
    memcpy(changes->old_cells + at, old_cells + from, cell_bytes);
    memcpy(changes->new_cells + at, new_cells + from, cell_bytes);
}

#define SIMD_LEVEL 0
#define LEVEL(name) name##_plain
#include "hazard_level.h"
#include "encode_level.h"
#include "decode_level.h"
#undef LEVEL
#undef SIMD_LEVEL

#if defined(__x86_64__)
#define SIMD_LEVEL 1
#define LEVEL(name) name##_avx2
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,lzcnt,popcnt")
#include "hazard_level.h"
#include "encode_level.h"
#include "decode_level.h"
#pragma GCC pop_options
#undef LEVEL
#undef SIMD_LEVEL

#define SIMD_LEVEL 2
#define LEVEL(name) name##_avx512
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")
#include "hazard_level.h"
#include "encode_level.h"
#include "decode_level.h"
#pragma GCC pop_options
#undef LEVEL
#undef SIMD_LEVEL
#endif

typedef outcome scan_kernel(const block *, const block *, const scheme *, change_list *, range_encoder *);
typedef outcome encode_kernel(const block *, const scheme *, const uint32_t *, size_t, range_encoder *);
typedef outcome decode_kernel(const block *, const scheme *, range_decoder *, size_t, uint32_t *, uint8_t *);

static const struct {
    scan_kernel *scan;
    encode_kernel *encode;
    decode_kernel *decode;
} kernels[] = {
    {scan_plain, encode_plain, decode_plain},
#if defined(__x86_64__)
    {scan_avx2, encode_avx2, decode_avx2},
    {scan_avx512, encode_avx512, decode_avx512},
#endif
};

static outcome close_stream(range_encoder *coder, outcome result, byte_string *stream)
{
    if (result == DONE && !encoder_reserve(coder))
        result = NO_MEMORY;
    if (result == DONE)
        encoder_close(coder, stream);
    else
        free(coder->data);
    return result;
}

void scan(const block *old_cells, const block *new_cells, const scheme *type, change_list *changes)
{
    kernels[simd_level()].scan(old_cells, new_cells, type, changes, NULL);
}

outcome scan_positions(const block *old_cells, const block *new_cells, const scheme *type, change_list *changes,
                       byte_string *stream)
{
    range_encoder coder;
    if (!encoder_open(&coder, changes->capacity + 64))
        return NO_MEMORY;
    outcome result = kernels[simd_level()].scan(old_cells, new_cells, type, changes, &coder);
    return close_stream(&coder, result, stream);
}

outcome encode_positions(const block *cells, const scheme *type, const uint32_t *positions, size_t count,
                         byte_string *stream)
{
    range_encoder coder;
    if (!are_ascending(positions, count, cells->cells))
        return BAD_POSITIONS;
    if (!encoder_open(&coder, count + 64))
        return NO_MEMORY;
    outcome result = kernels[simd_level()].encode(cells, type, positions, count, &coder);
    return close_stream(&coder, result, stream);
}

/* The one hazard of all cells: positions are quotients. */
static outcome decode_even(const block *cells, const scheme *type, range_decoder *coder, size_t changed,
                           uint32_t *positions)
{
    clock_state state = open_clock(type);
    uint64_t hazard = type->hazards[0], last = (uint64_t)cells->cells * hazard;
    if (!hazard && changed)
        return BEYOND_BLOCK;
    for (size_t n = 0; n < changed; n++) {
        outcome result = decode_rounds(coder, &state, last);
        if (result != DONE)
            return result;
        uint64_t cell = (state.base + clock_ahead(coder, &state)) / hazard;
        while (is_after(coder, &state, (cell + 1) * hazard))
            cell++;
        if (cell >= cells->cells)
            return BEYOND_BLOCK;
        positions[n] = (uint32_t)cell;
        decode_change(coder, &state, cell * hazard, (cell + 1) * hazard);
    }
    return decoder_ended(coder) ? DONE : WRONG_LENGTH;
}

outcome decode_positions(const block *cells, const scheme *type, const uint8_t *stream, size_t stream_bytes,
                         size_t count, uint32_t *positions, uint8_t *old_cells)
{
    range_decoder coder;
    decoder_open(&coder, stream, stream_bytes);
    if (type->classes > 1)
        return kernels[simd_level()].decode(cells, type, &coder, count, positions, old_cells);
    outcome result = decode_even(cells, type, &coder, count, positions);
    if (result == DONE)
        gather(cells, type->cell_bytes, positions, count, old_cells);
    return result;
}
