/* Decoders under clang's libFuzzer, which searches for inputs that reach new code; seeds.py writes its first inputs.
 *
 * The file named by DCR_SURVIVAL holds the clock's table. An input is a header, signs, a stream of positions and a stream
 * of values. All instruction sets must agree on the outcome and on what was decoded, whatever the input is.
 */
#include <stdio.h>
#include <stdlib.h>

#include "cells.h"

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            abort(); \
        } \
    } while (0)

enum { MOST_CELLS = 3 * CHUNK_CELLS, LEVELS = 3 };

/* Little-endian, as seeds.py packs it. */
typedef struct {
    uint8_t kind, units, first_exponent_low, first_exponent_high, by_class, cell_seed;
    uint16_t cells, changed, positions_bytes;
    uint16_t hazards[CLASSES];
} input_header;

typedef struct {
    outcome positions_outcome, values_outcome;
    uint32_t *positions;
    uint8_t *before, *after;
} decoded;

int LLVMFuzzerInitialize(int *count, char ***arguments);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerInitialize(int *count, char ***arguments)
{
    uint64_t table[SURVIVAL_STEPS + 1];
    const char *path = getenv("DCR_SURVIVAL");
    FILE *file = path ? fopen(path, "rb") : NULL;
    (void)count, (void)arguments;
    CHECK(file && fread(table, sizeof table, 1, file) == 1);
    fclose(file);
    set_survival(table);
    return 0;
}

static scheme read_type(const input_header *header)
{
    static const uint8_t kinds[][4] = {{1, 0, 0, 0}, {1, 2, 3, 4}, {1, 2, 2, 5},  {2, 1, 0, 0},
                                       {2, 2, 10, 5}, {2, 2, 7, 8}, {4, 2, 23, 8}, {8, 2, 52, 11}};
    const uint8_t *kind = kinds[header->kind % 8];
    scheme type = {.cell_bytes = kind[0], .order = kind[1], .exponent_shift = kind[2],
                   .exponent_mask = (1u << kind[3]) - 1, .unit_bits = 14 + (header->units & 127) % 11,
                   .halved = header->units >> 7};
    type.classes = header->by_class & 1 ? CLASSES : 1;
    type.first_exponent = (header->first_exponent_low | (uint32_t)header->first_exponent_high << 8) & type.exponent_mask;
    memcpy(type.hazards, header->hazards, sizeof type.hazards);
    return type;
}

/* The same bytes as seeds.py makes. */
static uint8_t *make_cells(uint32_t seed, size_t bytes)
{
    uint8_t *cells = malloc(bytes + 1);
    for (size_t n = 0; n < bytes; n++)
        cells[n] = (uint8_t)((uint32_t)(n + 1) * (2 * seed + 1) * 2654435761u >> 21);
    return cells;
}

/* A copy of its exact size, so that one byte too far is an error. */
static uint8_t *copied(const uint8_t *from, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    memcpy(copy, from, size);
    return copy;
}

static decoded decode(int level, const block *cells, const scheme *type, size_t changed, const uint8_t *signs,
                      const uint8_t *positions, size_t positions_bytes, const uint8_t *values, size_t values_bytes)
{
    decoded result = {.values_outcome = DONE, .positions = calloc(changed + 1, 4),
                      .before = calloc(changed + 1, type->cell_bytes), .after = calloc(changed + 1, type->cell_bytes)};
    set_simd_level(level);
    result.positions_outcome =
        decode_positions(cells, type, positions, positions_bytes, changed, result.positions, result.before);
    if (result.positions_outcome == DONE) {
        CHECK(are_ascending(result.positions, changed, cells->cells));
        result.values_outcome =
            decode_values(type, signs, values, values_bytes, result.before, changed, result.after);
    }
    return result;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input_header header;
    if (size < sizeof header)
        return -1;
    memcpy(&header, data, sizeof header);
    scheme type = read_type(&header);
    size_t left = size - sizeof header, cells = header.cells % (MOST_CELLS + 1), changed = header.changed;
    size_t sign_bytes = (changed + 7) / 8;
    if (changed > cells || sign_bytes > left)
        return -1;
    size_t positions_bytes = header.positions_bytes < left - sign_bytes ? header.positions_bytes : left - sign_bytes;
    size_t values_bytes = left - sign_bytes - positions_bytes;
    const uint8_t *at = data + sizeof header;
    uint8_t *signs = copied(at, sign_bytes), *positions = copied(at + sign_bytes, positions_bytes);
    uint8_t *values = copied(at + sign_bytes + positions_bytes, values_bytes);
    uint8_t *bytes = make_cells(header.cell_seed, cells * type.cell_bytes);
    size_t cut = cells ? header.cell_seed % cells : 0;
    piece pieces[2] = {{bytes, cut}, {bytes + cut * type.cell_bytes, cells - cut}};
    block all = {pieces, 2, cells};
    decoded results[LEVELS];
    for (int level = 0; level < LEVELS; level++)
        results[level] =
            decode(level, &all, &type, changed, signs, positions, positions_bytes, values, values_bytes);
    for (int level = 0; level < LEVELS; level++) {
        decoded *one = &results[level], *other = &results[0];
        CHECK((one->positions_outcome == DONE) == (other->positions_outcome == DONE));
        CHECK((one->values_outcome == DONE) == (other->values_outcome == DONE));
        if (one->positions_outcome == DONE && one->values_outcome == DONE) {
            CHECK(!memcmp(one->positions, other->positions, 4 * changed));
            CHECK(!memcmp(one->after, other->after, changed * type.cell_bytes));
        }
    }
    for (int level = 0; level < LEVELS; level++) {
        free(results[level].positions);
        free(results[level].before);
        free(results[level].after);
    }
    free(signs);
    free(positions);
    free(values);
    free(bytes);
    return 0;
}
