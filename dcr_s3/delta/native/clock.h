/* The clock's distribution and the symbols coded by it. */
#ifndef DCR_CLOCK_H
#define DCR_CLOCK_H

#include "rangecoder.h"

#define TOTAL ((uint64_t)1 << TOTAL_BITS)

extern uint64_t survival_table[SURVIVAL_STEPS + 1];

/* Upper tail of the distribution at `clock` units of 2**-CLOCK_BITS bit, at most 8 bits. */
INLINE uint64_t survival(uint64_t clock)
{
    size_t step = clock >> 16 & 255;
    uint64_t upper = survival_table[step], lower = survival_table[step + 1];
    return (upper - ((upper - lower) * (clock & 0xFFFF) >> 16)) >> (clock >> CLOCK_BITS);
}

/* A walk over positions: hazards are summed in the block's units, `base` is the sum at the last symbol. */
typedef struct {
    uint64_t base;
    uint64_t round; /* 8 bits of clock, after which a symbol says that nothing changed */
    unsigned shift; /* from the block's units to the clock's */
    uint64_t tail;  /* survival at the end of a round */
} clock_state;

INLINE clock_state open_clock(const scheme *type)
{
    return (clock_state){0, (uint64_t)8 << type->unit_bits, CLOCK_BITS - type->unit_bits,
                         survival((uint64_t)8 << CLOCK_BITS)};
}

/* A change of a cell of this `hazard`, before which all hazards sum up to `start`. */
INLINE outcome encode_change(range_encoder *coder, clock_state *state, uint64_t start, uint64_t hazard)
{
    if (!hazard)
        return BAD_POSITIONS;
    while (__builtin_expect(start - state->base >= state->round, 0)) {
        if (!encoder_reserve(coder))
            return NO_MEMORY;
        uint64_t unit = coder->range >> TOTAL_BITS;
        encoder_advance(coder, unit * (TOTAL - state->tail), unit * state->tail);
        state->base += state->round;
    }
    if (!encoder_reserve(coder))
        return NO_MEMORY;
    uint64_t from = start - state->base, to = from + hazard;
    to = to < state->round ? to : state->round;
    uint64_t upper = survival(from << state->shift), lower = survival(to << state->shift);
    uint64_t unit = coder->range >> TOTAL_BITS;
    encoder_advance(coder, unit * (TOTAL - upper), unit * (upper - lower));
    state->base = start + hazard;
    return DONE;
}

/* Passes over full rounds. OUTSIDE_RANGE where the stream points nowhere, BEYOND_BLOCK where the clock exceeds
 * `last`, what it is before the last cell at most. */
INLINE outcome decode_rounds(range_decoder *coder, clock_state *state, uint64_t last)
{
    for (;;) {
        uint64_t unit = coder->range >> TOTAL_BITS;
        if (__builtin_expect(coder->offset < unit * (TOTAL - state->tail), 1))
            return DONE;
        if (coder->offset >= unit << TOTAL_BITS)
            return OUTSIDE_RANGE;
        decoder_advance(coder, unit * (TOTAL - state->tail), unit * state->tail);
        state->base += state->round;
        if (state->base > last)
            return BEYOND_BLOCK;
    }
}

enum { LOG_STEPS = 1024, LOG_BITS = 28, LOG_SLACK = 96 };

extern uint32_t log_table[LOG_STEPS + 1];

/* 2**28 * log2(x), to within a few units of 2**-24. */
INLINE int64_t scaled_log2(uint64_t x)
{
    unsigned zeros = (unsigned)__builtin_clzll(x);
    uint64_t mantissa = x << zeros << 1;
    uint64_t step = mantissa >> 54, fraction = mantissa >> 34 & 0xFFFFF;
    uint64_t lower = log_table[step], upper = log_table[step + 1];
    return ((int64_t)(63 - zeros) << LOG_BITS) + (int64_t)(lower + ((upper - lower) * fraction >> 20));
}

/* Where the coded symbol lies in the current round, in the block's units; never too far, and short of it by less than
 * LOG_SLACK units of the clock. */
INLINE uint64_t clock_ahead(const range_decoder *coder, const clock_state *state)
{
    uint64_t whole = (coder->range >> TOTAL_BITS) << TOTAL_BITS;
    int64_t log = scaled_log2(whole) - scaled_log2(whole - coder->offset);
    int64_t clock = (log >> (LOG_BITS - CLOCK_BITS)) - LOG_SLACK / 2;
    return (uint64_t)(clock > 0 ? clock : 0) >> state->shift;
}

/* Passes over the change of a cell whose hazards sum up to `start` before and `end` after it; false, having done
 * nothing, where the coded symbol lies behind that cell. */
INLINE bool decode_change(range_decoder *coder, clock_state *state, uint64_t start, uint64_t end)
{
    uint64_t from = start > state->base ? start - state->base : 0, to = end - state->base;
    to = to < state->round ? to : state->round;
    uint64_t lower = survival(to << state->shift), unit = coder->range >> TOTAL_BITS;
    if (__builtin_expect(coder->offset >= unit * (TOTAL - lower), 0))
        return false;
    uint64_t upper = survival(from << state->shift);
    decoder_advance(coder, unit * (TOTAL - upper), unit * (upper - lower));
    state->base = end;
    return true;
}

#endif
