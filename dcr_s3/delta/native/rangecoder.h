/* The range coder: 56-bit low and range, carries propagated into bytes already written, no division. */
#ifndef DCR_RANGECODER_H
#define DCR_RANGECODER_H

#include <stdlib.h>

#include "cells.h"

#define CODER_TOP ((uint64_t)1 << 56)
#define CODER_LOW_MASK (((uint64_t)1 << 48) - 1)
#define CODER_MASK (CODER_TOP - 1)
#define CODER_LEAST (CODER_TOP >> 8) /* below it the range gives a byte */

enum { CODER_SLACK = 16 }; /* bytes that one symbol may touch */

typedef struct {
    uint64_t low, range;
    uint8_t *data;
    size_t size, capacity;
} range_encoder;

INLINE bool encoder_open(range_encoder *coder, size_t capacity)
{
    coder->low = 0;
    coder->range = CODER_TOP;
    coder->size = 0;
    coder->capacity = capacity + CODER_SLACK;
    coder->data = malloc(coder->capacity);
    return coder->data != NULL;
}

/* Room for one more symbol; call before each. */
INLINE bool encoder_reserve(range_encoder *coder)
{
    if (__builtin_expect(coder->capacity - coder->size >= CODER_SLACK, 1))
        return true;
    uint8_t *larger = realloc(coder->data, 2 * coder->capacity);
    if (!larger)
        return false;
    coder->data = larger;
    coder->capacity *= 2;
    return true;
}

INLINE void encoder_carry(range_encoder *coder)
{
    if (__builtin_expect(coder->low < CODER_TOP, 1))
        return;
    coder->low -= CODER_TOP;
    size_t last = coder->size;
    while (++coder->data[--last] == 0) {
    }
}

INLINE void encoder_advance(range_encoder *coder, uint64_t start, uint64_t size)
{
    coder->low += start;
    coder->range = size;
    encoder_carry(coder);
    unsigned bytes = (unsigned)(__builtin_clzll(size) - 8) >> 3;
    uint64_t leading = __builtin_bswap64(coder->low << 8);
    memcpy(coder->data + coder->size, &leading, 8);
    coder->size += bytes;
    coder->low = (coder->low << (8 * bytes)) & CODER_MASK;
    coder->range <<= 8 * bytes;
}

/* Most flags are likely ones, which make no byte: those take a short way. */
INLINE void encoder_flag(range_encoder *coder, bool flag, uint32_t chance)
{
    uint64_t bound = (coder->range >> 16) * chance;
    uint64_t start = flag ? bound : 0, size = flag ? coder->range - bound : bound;
    if (__builtin_expect(size < CODER_LEAST, 0)) {
        encoder_advance(coder, start, size);
        return;
    }
    coder->low += start;
    coder->range = size;
    encoder_carry(coder);
}

INLINE void encoder_raw(range_encoder *coder, uint64_t value, unsigned bits)
{
    uint64_t unit = coder->range >> bits;
    encoder_advance(coder, unit * value, unit);
}

/* Ends a stream, and makes the coder ready for another one behind it. One more byte is enough, as zeros follow it. */
INLINE void encoder_end(range_encoder *coder)
{
    coder->low += CODER_LOW_MASK;
    encoder_carry(coder);
    coder->data[coder->size++] = (uint8_t)(coder->low >> 48);
    coder->low = 0;
    coder->range = CODER_TOP;
}

typedef struct {
    uint64_t offset, range;
    const uint8_t *data;
    size_t size, next; /* `next` counts bytes read, zeros past the end included */
} range_decoder;

/* Bytes `next` to `next + 7` of the stream, big-endian, zeros past its end. */
INLINE uint64_t decoder_peek(const range_decoder *coder)
{
    uint64_t ahead = 0;
    if (__builtin_expect(coder->next + 8 <= coder->size, 1)) {
        memcpy(&ahead, coder->data + coder->next, 8);
    } else if (coder->next < coder->size) {
        memcpy(&ahead, coder->data + coder->next, coder->size - coder->next);
    }
    return __builtin_bswap64(ahead);
}

INLINE void decoder_open(range_decoder *coder, const uint8_t *data, size_t size)
{
    coder->range = CODER_TOP;
    coder->data = data;
    coder->size = size;
    coder->next = 0;
    coder->offset = decoder_peek(coder) >> 8;
    coder->next = 7;
}

INLINE void decoder_advance(range_decoder *coder, uint64_t start, uint64_t size)
{
    unsigned bytes = (unsigned)(__builtin_clzll(size) - 8) >> 3;
    uint64_t ahead = decoder_peek(coder) >> 8; /* two shifts: the count may be 64 */
    coder->offset = (coder->offset - start) << (8 * bytes) | ahead >> (56 - 8 * bytes);
    coder->range = size << (8 * bytes);
    coder->next += bytes;
}

INLINE bool decoder_flag(range_decoder *coder, uint32_t chance)
{
    uint64_t bound = (coder->range >> 16) * chance;
    bool flag = coder->offset >= bound;
    uint64_t start = flag ? bound : 0, size = flag ? coder->range - bound : bound;
    if (__builtin_expect(size < CODER_LEAST, 0)) {
        decoder_advance(coder, start, size);
        return flag;
    }
    coder->offset -= start;
    coder->range = size;
    return flag;
}

/* False where the stream points outside its range. */
INLINE bool decoder_raw(range_decoder *coder, unsigned bits, uint64_t *value)
{
    uint64_t unit = coder->range >> bits;
    *value = coder->offset / unit;
    if (*value >> bits)
        return false;
    decoder_advance(coder, unit * *value, unit);
    return true;
}

INLINE bool decoder_ended(const range_decoder *coder)
{
    return coder->next - 6 == coder->size;
}

#endif
