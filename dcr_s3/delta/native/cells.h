/* Cells as numbers: unaligned loads and stores, exponent classes, and integers that grow with the value. */
#ifndef DCR_CELLS_H
#define DCR_CELLS_H

#include <string.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

INLINE uint64_t load_cell(const uint8_t *at, uint32_t cell_bytes)
{
    uint16_t two;
    uint32_t four;
    uint64_t eight;
    switch (cell_bytes) {
    case 1:
        return *at;
    case 2:
        memcpy(&two, at, 2);
        return two;
    case 4:
        memcpy(&four, at, 4);
        return four;
    default:
        memcpy(&eight, at, 8);
        return eight;
    }
}

INLINE void store_cell(uint8_t *at, uint64_t cell, uint32_t cell_bytes)
{
    uint16_t two = (uint16_t)cell;
    uint32_t four = (uint32_t)cell;
    switch (cell_bytes) {
    case 1:
        *at = (uint8_t)cell;
        break;
    case 2:
        memcpy(at, &two, 2);
        break;
    case 4:
        memcpy(at, &four, 4);
        break;
    default:
        memcpy(at, &cell, 8);
    }
}

INLINE uint32_t exponent_of(uint64_t cell, const scheme *type)
{
    return (uint32_t)(cell >> type->exponent_shift) & type->exponent_mask;
}

INLINE uint32_t class_of(uint64_t cell, const scheme *type)
{
    uint32_t exponent = exponent_of(cell, type);
    uint32_t above = exponent > type->first_exponent ? exponent - type->first_exponent : 0;
    return above < CLASSES - 1 ? above : CLASSES - 1;
}

/* All ones as wide as a cell. */
INLINE uint64_t widest(uint32_t cell_bytes)
{
    return UINT64_MAX >> (64 - 8 * cell_bytes);
}

/* What maps cells to numbers and back by exclusive or; no branch, as signs are as good as random. */
INLINE uint64_t order_mask(bool negative, uint32_t order, uint32_t cell_bytes)
{
    uint64_t top = (uint64_t)1 << (8 * cell_bytes - 1);
    uint64_t flipped = order == UNSIGNED_ORDER ? 0 : top;
    return order == FLOAT_ORDER ? (top | -(uint64_t)negative) & widest(cell_bytes) : flipped;
}

INLINE uint64_t ordered(uint64_t cell, uint32_t order, uint32_t cell_bytes)
{
    return cell ^ order_mask(cell >> (8 * cell_bytes - 1), order, cell_bytes);
}

INLINE uint64_t unordered(uint64_t number, uint32_t order, uint32_t cell_bytes)
{
    return number ^ order_mask(!(number >> (8 * cell_bytes - 1)), order, cell_bytes);
}

/* Calls the always-inlined `function` with the size of a cell as a constant. */
#define FOR_CELL_BYTES(cell_bytes, function, ...) \
    switch (cell_bytes) { \
    case 1: \
        function(__VA_ARGS__, 1); \
        break; \
    case 2: \
        function(__VA_ARGS__, 2); \
        break; \
    case 4: \
        function(__VA_ARGS__, 4); \
        break; \
    default: \
        function(__VA_ARGS__, 8); \
    }

#endif
