/* Scanning blocks, and coding the positions of their changes by hazard clock. */
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <math.h>

#include "clock.h"
#include "cursor.h"
#include "targets.h"

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

/* Positions on their way into one stream, or into one for each half of the block. */
typedef struct {
    const scheme *type;
    range_encoder stream;
    clock_state state;
    uint64_t clock;  /* sum of hazards from cell `start` */
    size_t start;    /* first cell of the half */
    size_t half;     /* first cell of the second half, or SIZE_MAX */
    size_t changed;
    size_t changed_before_half, bytes_before_half;
} position_coder;

enum { HALVES_BYTES = 8 };      /* changes in the first half, bytes of its stream */
enum { MOST_LINES_AHEAD = 16 }; /* with one change; more would only queue */

static bool open_positions(position_coder *coder, const scheme *type, size_t cells, size_t capacity)
{
    *coder = (position_coder){.type = type, .state = open_clock(type), .half = SIZE_MAX};
    if (type->halved)
        coder->half = cells / 2;
    if (!encoder_open(&coder->stream, capacity + HALVES_BYTES))
        return false;
    coder->stream.size = type->halved ? HALVES_BYTES : 0;
    return true;
}

/* Before the run of `count` cells from cell `first`: begins the second half there, or shortens the run to end there. */
static bool meet_half(position_coder *coder, size_t first, size_t *count)
{
    if (first < coder->half) {
        *count = smaller(*count, coder->half - first);
        return true;
    }
    if (first > coder->half)
        return true;
    if (!encoder_reserve(&coder->stream))
        return false;
    encoder_end(&coder->stream);
    coder->state = open_clock(coder->type);
    coder->clock = 0;
    coder->start = first;
    coder->changed_before_half = coder->changed;
    coder->bytes_before_half = coder->stream.size - HALVES_BYTES;
    return true;
}

static outcome close_positions(position_coder *coder, outcome result, byte_string *stream)
{
    range_encoder *bytes = &coder->stream;
    if (result == DONE && !encoder_reserve(bytes))
        result = NO_MEMORY;
    if (result != DONE) {
        free(bytes->data);
        return result;
    }
    encoder_end(bytes);
    if (coder->type->halved) {
        uint32_t halves[2] = {(uint32_t)coder->changed_before_half, (uint32_t)coder->bytes_before_half};
        memcpy(bytes->data, halves, HALVES_BYTES);
    }
    *stream = (byte_string){bytes->data, bytes->size};
    return DONE;
}

/* A stream of positions and the cells that it is about. */
typedef struct {
    size_t first, end, changed;
    range_decoder coder;
} position_half;

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
BEGIN_TARGET("avx2,bmi,bmi2,lzcnt,popcnt")
#include "hazard_level.h"
#include "encode_level.h"
#include "decode_level.h"
END_TARGET
#undef LEVEL
#undef SIMD_LEVEL

#define SIMD_LEVEL 2
#define LEVEL(name) name##_avx512
BEGIN_TARGET("avx2,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")
#include "hazard_level.h"
#include "encode_level.h"
#include "decode_level.h"
END_TARGET
#undef LEVEL
#undef SIMD_LEVEL
#endif

typedef outcome scan_kernel(const block *, const block *, uint32_t, position_coder *, change_list *);
typedef outcome encode_kernel(const block *, position_coder *, const uint32_t *, size_t);
typedef outcome decode_kernel(const block *, const scheme *, const position_half *, uint32_t *, uint8_t *);

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

void scan(const block *old_cells, const block *new_cells, uint32_t cell_bytes, change_list *changes)
{
    kernels[simd_level()].scan(old_cells, new_cells, cell_bytes, NULL, changes);
}

outcome scan_positions(const block *old_cells, const block *new_cells, const scheme *type, change_list *changes,
                       byte_string *stream)
{
    position_coder coder;
    if (!open_positions(&coder, type, old_cells->cells, changes->capacity))
        return NO_MEMORY;
    outcome result = kernels[simd_level()].scan(old_cells, new_cells, type->cell_bytes, &coder, changes);
    return close_positions(&coder, result, stream);
}

outcome encode_positions(const block *cells, const scheme *type, const uint32_t *positions, size_t count,
                         byte_string *stream)
{
    position_coder coder;
    if (!are_ascending(positions, count, cells->cells))
        return BAD_POSITIONS;
    if (!open_positions(&coder, type, cells->cells, count))
        return NO_MEMORY;
    outcome result = kernels[simd_level()].encode(cells, &coder, positions, count);
    return close_positions(&coder, result, stream);
}

/* The one hazard of all cells: positions are quotients. */
static outcome decode_even(const scheme *type, position_half half, uint32_t *positions)
{
    clock_state state = open_clock(type);
    uint64_t hazard = type->hazards[0], cells = half.end - half.first;
    if (!hazard && half.changed)
        return BEYOND_BLOCK;
    for (size_t n = 0; n < half.changed; n++) {
        outcome result = decode_rounds(&half.coder, &state, cells * hazard);
        if (result != DONE)
            return result;
        uint64_t cell = (state.base + clock_ahead(&half.coder, &state)) / hazard;
        while (!decode_change(&half.coder, &state, cell * hazard, (cell + 1) * hazard))
            cell++;
        if (cell >= cells)
            return BEYOND_BLOCK;
        positions[n] = (uint32_t)(half.first + cell);
    }
    return decoder_ended(&half.coder) ? DONE : WRONG_LENGTH;
}

/* Opens the streams of a block's halves; without halves, the second is empty. */
static outcome open_halves(const scheme *type, size_t cells, const uint8_t *stream, size_t stream_bytes, size_t count,
                           position_half halves[2])
{
    uint32_t split[2] = {(uint32_t)count, (uint32_t)stream_bytes};
    size_t middle = type->halved ? cells / 2 : cells;
    halves[1] = (position_half){.first = middle, .end = cells};
    if (type->halved) {
        if (stream_bytes < HALVES_BYTES || !middle)
            return BAD_HALVES;
        memcpy(split, stream, HALVES_BYTES);
        stream += HALVES_BYTES;
        stream_bytes -= HALVES_BYTES;
        if (split[0] > count || split[1] > stream_bytes)
            return BAD_HALVES;
        halves[1].changed = count - split[0];
        decoder_open(&halves[1].coder, stream + split[1], stream_bytes - split[1]);
    } else {
        decoder_open(&halves[1].coder, (const uint8_t *)"", 1);
    }
    halves[0] = (position_half){.first = 0, .end = middle, .changed = split[0]};
    decoder_open(&halves[0].coder, stream, split[1]);
    return DONE;
}

outcome decode_positions(const block *cells, const scheme *type, const uint8_t *stream, size_t stream_bytes,
                         size_t count, uint32_t *positions, uint8_t *old_cells)
{
    position_half halves[2];
    outcome result = open_halves(type, cells->cells, stream, stream_bytes, count, halves);
    if (result != DONE)
        return result;
    if (type->classes > 1)
        return kernels[simd_level()].decode(cells, type, halves, positions, old_cells);
    result = decode_even(type, halves[0], positions);
    if (result == DONE)
        result = decode_even(type, halves[1], positions + halves[0].changed);
    if (result == DONE)
        gather(cells, type->cell_bytes, positions, count, old_cells);
    return result;
}
