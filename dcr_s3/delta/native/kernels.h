/* The kernels' interface, free of Python so that a plain C program can drive and fuzz them.
 *
 * Every function reads and writes only inside the arrays it is given, whatever they hold.
 */
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels read cells and streams as little-endian; other machines run the NumPy reference"
#endif

#ifndef DCR_KERNELS_H
#define DCR_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    CLASSES = 16,       /* classes of old exponents with hazards of their own */
    CLOCK_BITS = 24,    /* a clock counts 2**-24 bit */
    TOTAL_BITS = 36,    /* cumulative frequencies are out of 2**36 */
    SURVIVAL_STEPS = 256,
    GROUP_CELLS = 64,   /* cells whose hazards are summed at once */
    CHUNK_CELLS = 4096, /* cells decoded while they are in the first-level cache */
    SCAN_CELLS = 1024,  /* cells encoded at once: few, so that memory need not pause while the coder works */
    CHUNK_GROUPS = CHUNK_CELLS / GROUP_CELLS,
    MOST_EXPONENTS = 2048,
    SAMPLE_CELLS = 256,  /* a tally samples runs of so many cells */
};

#define SAMPLE_SCATTER 0x9E3779B1u /* spreads the runs that a tally takes */

typedef enum {
    DONE = 0,
    NO_MEMORY,
    OUTSIDE_RANGE,   /* the stream points where no encoder goes */
    BEYOND_BLOCK,    /* a change lies after the last cell */
    WRONG_LENGTH,    /* the stream is longer or shorter than what it codes */
    OVERSIZED_STEP,  /* a step leaves the type's values */
    SURPLUS_SIGNS,   /* sign bits are set after the last change */
    BAD_POSITIONS,   /* positions are not ascending cells of the block that can change */
    BAD_HALVES,      /* the lengths of the two halves do not fit */
} outcome;

typedef enum { UNSIGNED_ORDER = 0, SIGNED_ORDER, FLOAT_ORDER } cell_order;

typedef struct {
    uint8_t *data;
    size_t cells;
} piece;

/* A block's cells, in pieces walked one after the other. */
typedef struct {
    const piece *pieces;
    size_t count;
    size_t cells;
} block;

/* Element type and hazard model of a block. */
typedef struct {
    uint32_t cell_bytes; /* 1, 2, 4 or 8 */
    uint32_t order;
    uint32_t exponent_shift;
    uint32_t exponent_mask;
    uint32_t classes; /* 1 or CLASSES */
    uint32_t first_exponent;
    uint32_t unit_bits; /* hazards count 2**-unit_bits bit */
    uint32_t halved;    /* 1 where the positions of the two halves are coded apart */
    uint16_t hazards[CLASSES];
} scheme;

/* Where changes are written. Where they might not fit, `capacity` becomes 0 and the rest is only counted. */
typedef struct {
    uint32_t *positions;
    uint8_t *old_cells;
    uint8_t *new_cells;
    size_t capacity;
    size_t count;
} change_list;

typedef struct {
    uint8_t *data; /* malloc'ed; the caller frees it */
    size_t size;
} byte_string;

/* Sets the distribution's table; call once before anything that codes positions. */
void set_survival(const uint64_t table[SURVIVAL_STEPS + 1]);

/* Instruction sets: 0 plain C, 1 AVX2, 2 AVX-512 with VBMI. */
int best_simd_level(void);
int simd_level(void);
void set_simd_level(int level); /* at most best_simd_level() */

/* Counts per old exponent (exponent_mask + 1 each) of one run of SAMPLE_CELLS cells in 2**stride_log2. */
void tally(const block *old_cells, const block *new_cells, const scheme *type, unsigned stride_log2, uint64_t *cells,
           uint64_t *changed);
void count_exponents(const uint8_t *cells, size_t count, const scheme *type, uint64_t *counts);

/* Both blocks hold equally many cells. */
void scan(const block *old_cells, const block *new_cells, uint32_t cell_bytes, change_list *changes);
outcome scan_positions(const block *old_cells, const block *new_cells, const scheme *type, change_list *changes,
                       byte_string *stream);
outcome encode_positions(const block *cells, const scheme *type, const uint32_t *positions, size_t count,
                         byte_string *stream);
outcome decode_positions(const block *cells, const scheme *type, const uint8_t *stream, size_t stream_bytes,
                         size_t count, uint32_t *positions, uint8_t *old_cells);

/* `signs` has room for (count + 7) / 8 bytes. */
outcome encode_values(const scheme *type, const uint8_t *old_cells, const uint8_t *new_cells, size_t count,
                      uint8_t *signs, byte_string *stream);
outcome decode_values(const scheme *type, const uint8_t *signs, const uint8_t *stream, size_t stream_bytes,
                      const uint8_t *old_cells, size_t count, uint8_t *new_cells);

bool are_ascending(const uint32_t *positions, size_t count, size_t cells);

/* The cells at ascending positions of the block. */
void gather(const block *cells, uint32_t cell_bytes, const uint32_t *positions, size_t count, uint8_t *values);
outcome apply_changes(const block *dest, uint32_t cell_bytes, const uint32_t *positions, const uint8_t *values,
                      size_t count);

void digest_range(const uint32_t key[4], uint64_t start, const uint8_t *cells, size_t count, uint32_t cell_bytes,
                  uint64_t sums[2]);
void digest_at(const uint32_t key[4], const uint64_t *indices, const uint8_t *cells, size_t count,
               uint32_t cell_bytes, uint64_t sums[2]);

#endif
