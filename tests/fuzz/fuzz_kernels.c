/* Drives the compiled kernels with random blocks and damaged streams, to be built with sanitizers.
 *
 * usage: fuzz_kernels SEED ROUNDS   (exit status 0: nothing went wrong; sanitizers abort on a wild access)
 *
 * Every array is allocated to its exact size, so that one byte too far is an error. Sound streams must decode to what
 * was encoded; damaged ones must give an outcome, whichever, and ascending positions inside the block where it is DONE.
 */
#include <stdio.h>
#include <stdlib.h>

#include "clock.h"
#include "kernels.h"
#include "places.h"

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            abort(); \
        } \
    } while (0)

static uint64_t seed;

static uint64_t draw(uint64_t below)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return below ? (seed >> 11) % below : 0;
}

typedef struct {
    uint8_t *bytes;
    piece *pieces;
    block cells;
} cut_block;

/* A copy of `bytes` in up to eight pieces, each an allocation of its own, at odd addresses. */
static cut_block cut(const uint8_t *bytes, size_t cells, uint32_t cell_bytes)
{
    cut_block result = {NULL, malloc(8 * sizeof(piece)), {NULL, 0, cells}};
    size_t done = 0;
    while (result.cells.count < 7 && draw(3)) {
        size_t size = draw(cells - done + 1);
        uint8_t *copy = malloc(size * cell_bytes + 1);
        memcpy(copy + 1, bytes + done * cell_bytes, size * cell_bytes);
        result.pieces[result.cells.count++] = (piece){copy + 1, size};
        done += size;
    }
    uint8_t *copy = malloc((cells - done) * cell_bytes + 1);
    memcpy(copy + 1, bytes + done * cell_bytes, (cells - done) * cell_bytes);
    result.pieces[result.cells.count++] = (piece){copy + 1, cells - done};
    result.cells.pieces = result.pieces;
    return result;
}

static void release(cut_block *block)
{
    for (size_t n = 0; n < block->cells.count; n++)
        free(block->pieces[n].data - 1);
    free(block->pieces);
}

static scheme draw_scheme(void)
{
    static const uint8_t kinds[][4] = {{1, 0, 0, 0}, {1, 2, 3, 4}, {1, 2, 2, 5},  {2, 1, 0, 0},
                                       {2, 2, 10, 5}, {2, 2, 7, 8}, {4, 2, 23, 8}, {8, 2, 52, 11}};
    const uint8_t *kind = kinds[draw(8)];
    scheme type = {.cell_bytes = kind[0], .order = kind[1], .exponent_shift = kind[2],
                   .exponent_mask = (1u << kind[3]) - 1, .unit_bits = 14 + (uint32_t)draw(11),
                   .halved = (uint32_t)draw(2)};
    type.classes = kind[3] && draw(3) ? CLASSES : 1;
    type.first_exponent = type.classes > 1 ? (uint32_t)draw(type.exponent_mask + 1) : 0;
    for (size_t n = 0; n < CLASSES; n++)
        type.hazards[n] = (uint16_t)(1 + draw(draw(2) ? 65535 : 300));
    return type;
}

static void damage(byte_string *stream)
{
    for (uint64_t flips = 1 + draw(4); flips && stream->size; flips--)
        stream->data[draw(stream->size)] ^= (uint8_t)(1 << draw(8));
    if (!draw(4))
        stream->size = draw(stream->size + 1);
}

/* Decodes into arrays of exactly `count` entries from an exact copy of the stream. */
static outcome decode(const block *old_cells, const scheme *type, byte_string positions_stream, const uint8_t *signs,
                      byte_string values_stream, size_t count, uint32_t *positions, uint8_t *before, uint8_t *after)
{
    uint8_t *copy = malloc(positions_stream.size + 1), *other = malloc(values_stream.size + 1);
    memcpy(copy + 1, positions_stream.data, positions_stream.size);
    memcpy(other + 1, values_stream.data, values_stream.size);
    outcome result =
        decode_positions(old_cells, type, copy + 1, positions_stream.size, count, positions, before);
    if (result == DONE)
        result = decode_values(type, signs, other + 1, values_stream.size, before, count, after);
    free(copy);
    free(other);
    return result;
}

static void fuzz_block(void)
{
    scheme type = draw_scheme();
    size_t cells = 1 + draw(draw(8) ? 300 : 20000), bytes = cells * type.cell_bytes;
    uint8_t *plain_old = malloc(bytes), *plain_new = malloc(bytes);
    uint64_t density = 1 + draw(draw(2) ? 3 : 200), narrow = draw(2);
    for (size_t n = 0; n < bytes; n++)
        plain_old[n] = narrow ? (uint8_t)draw(4) : (uint8_t)draw(256);
    memcpy(plain_new, plain_old, bytes);
    for (size_t n = 0; n < bytes; n++)
        if (!draw(density))
            plain_new[n] ^= (uint8_t)(1 << draw(8));
    cut_block old = cut(plain_old, cells, type.cell_bytes), new = cut(plain_new, cells, type.cell_bytes);

    size_t room = cells + CHUNK_CELLS;
    change_list changes = {malloc(4 * room), malloc(room * type.cell_bytes), malloc(room * type.cell_bytes), room, 0};
    byte_string stream = {NULL, 0}, again = {NULL, 0}, values = {NULL, 0};
    CHECK(scan_positions(&old.cells, &new.cells, &type, &changes, &stream) == DONE);
    CHECK(encode_positions(&old.cells, &type, changes.positions, changes.count, &again) == DONE);
    CHECK(stream.size == again.size && !memcmp(stream.data, again.data, stream.size));
    size_t count = changes.count;
    uint8_t *signs = malloc((count + 7) / 8 + 1);
    CHECK(encode_values(&type, changes.old_cells, changes.new_cells, count, signs, &values) == DONE);

    uint32_t *positions = malloc(4 * count + 1);
    uint8_t *before = malloc(count * type.cell_bytes + 1), *after = malloc(count * type.cell_bytes + 1);
    outcome sound = decode(&old.cells, &type, stream, signs, values, count, positions, before, after);
    bool decodable = cells > 1 || !type.halved;
    CHECK(sound == (decodable ? DONE : BAD_HALVES));
    if (decodable) {
        CHECK(!memcmp(positions, changes.positions, 4 * count));
        CHECK(!memcmp(after, changes.new_cells, count * type.cell_bytes));
        CHECK(apply_changes(&old.cells, type.cell_bytes, positions, after, count) == DONE);
        change_list none = {malloc(4 * room), malloc(room * 8), malloc(room * 8), room, 0};
        scan(&old.cells, &new.cells, type.cell_bytes, &none);
        CHECK(!none.count);
        free(none.positions);
        free(none.old_cells);
        free(none.new_cells);
    }
    for (int attempt = 0; attempt < 8; attempt++) {
        damage(draw(2) ? &stream : &values);
        if (count && draw(2))
            signs[draw((count + 7) / 8)] ^= (uint8_t)(1 << draw(8));
        outcome result = decode(&old.cells, &type, stream, signs, values, count, positions, before, after);
        if (result == DONE)
            CHECK(are_ascending(positions, count, cells));
    }
    release(&old);
    release(&new);
    free(plain_old);
    free(plain_new);
    free(changes.positions);
    free(changes.old_cells);
    free(changes.new_cells);
    free(stream.data);
    free(again.data);
    free(values.data);
    free(signs);
    free(positions);
    free(before);
    free(after);
}

/* Some places of a block: others keep their cells, and positions that are not ascending cells are refused. */
static void fuzz_places(void)
{
    uint32_t cell_bytes = 1u << draw(4);
    size_t cells = 1 + draw(draw(8) ? 300 : 200000), bytes = cells * cell_bytes, count = 0;
    uint8_t *plain = malloc(bytes), *values = malloc(bytes);
    int64_t *positions = malloc(8 * cells);
    uint64_t density = 1 + draw(5);
    for (size_t n = 0; n < bytes; n++)
        plain[n] = (uint8_t)draw(256);
    for (size_t n = 0; n < cells; n++)
        if (!draw(density))
            positions[count++] = (int64_t)n;
    cut_block old = cut(plain, cells, cell_bytes);
    int64_t *exact = malloc(8 * count + 1);
    memcpy(exact, positions, 8 * count);
    places at;
    CHECK(open_places(&old.cells, cell_bytes, exact, count, &at) == DONE);
    unsigned threads = (unsigned)draw(4);
    take_cells(&at, values, threads);
    for (size_t n = 0; n < count; n++) {
        CHECK(!memcmp(values + n * cell_bytes, plain + (size_t)exact[n] * cell_bytes, cell_bytes));
        values[n * cell_bytes] ^= 1;
        plain[(size_t)exact[n] * cell_bytes] ^= 1;
    }
    CHECK(first_other(&at, values, threads) == 0);
    put_cells(&at, values, threads);
    CHECK(first_other(&at, values, threads) == count);
    for (size_t number = 0, first = 0; number < old.cells.count; first += old.pieces[number++].cells)
        CHECK(!memcmp(old.pieces[number].data, plain + first * cell_bytes, old.pieces[number].cells * cell_bytes));
    if (count) {
        size_t wrong = draw(count);
        values[wrong * cell_bytes] ^= 1;
        CHECK(first_other(&at, values, threads) == wrong);
        exact[wrong] = draw(2) ? (int64_t)(cells + draw(9)) : -1 - (int64_t)draw(9);
        close_places(&at);
        CHECK(open_places(&old.cells, cell_bytes, exact, count, &at) == BAD_POSITIONS);
    } else {
        close_places(&at);
    }
    release(&old);
    free(plain);
    free(values);
    free(positions);
    free(exact);
}

/* The decoder's guess of the clock must never be ahead of it: it only searches forward from there. */
static void check_guesses(size_t rounds)
{
    for (size_t n = 0; n < rounds * 64; n++) {
        range_decoder coder = {.range = ((uint64_t)1 << 48) + draw(((uint64_t)1 << 52) - 1) * (1 + draw(15))};
        clock_state state = {0, (uint64_t)8 << CLOCK_BITS, 0, 0};
        uint64_t clock = draw((uint64_t)8 << CLOCK_BITS), unit = coder.range >> TOTAL_BITS;
        coder.offset = unit * (TOTAL - survival(clock + draw(2))) - (clock > 0);
        coder.offset = coder.offset > unit * (TOTAL - survival(clock)) ? coder.offset
                                                                       : unit * (TOTAL - survival(clock));
        uint64_t guess = clock_ahead(&coder, &state);
        CHECK(guess <= clock && clock - guess <= LOG_SLACK);
    }
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    seed = strtoull(arguments[1], NULL, 10) * 2654435761u + 88172645463325252u;
    size_t rounds = strtoull(arguments[2], NULL, 10);
    uint64_t table[SURVIVAL_STEPS + 1];
    if (fread(table, sizeof *table, SURVIVAL_STEPS + 1, stdin) != SURVIVAL_STEPS + 1)
        return 2;
    set_survival(table);
    check_guesses(rounds);
    for (size_t round = 0; round < rounds; round++) {
        set_simd_level((int)draw(3));
        fuzz_block();
        fuzz_places();
    }
    printf("%zu rounds, instruction sets up to %d\n", rounds, best_simd_level());
    return 0;
}
