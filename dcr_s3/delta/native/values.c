/* Steps between old and new cells: raw signs, and sizes as adaptive flags in a range-coded stream. */
#include "rangecoder.h"

enum { MAX_LENGTH = 63, FLAGS = 2 + MAX_LENGTH + 1, SLOWEST_RATE = 7, RAW_BITS = 16 };

typedef struct {
    uint16_t chance; /* that the flag is false, out of 65536 */
    uint16_t seen;
} flag_model;

typedef struct {
    flag_model flags[CLASSES][FLAGS];
} step_model;

static void open_model(step_model *model)
{
    for (size_t group = 0; group < CLASSES; group++)
        for (size_t number = 0; number < FLAGS; number++)
            model->flags[group][number] = (flag_model){1 << 15, 0};
}

INLINE void learn(flag_model *model, bool flag)
{
    unsigned rate = 32 - (unsigned)__builtin_clz(model->seen + 1u);
    rate = rate < SLOWEST_RATE ? rate : SLOWEST_RATE;
    uint32_t chance = model->chance;
    model->chance = (uint16_t)(flag ? chance - (chance >> rate) : chance + ((65536 - chance) >> rate));
    model->seen += model->seen < 1 << SLOWEST_RATE;
}

INLINE void encode_flag(range_encoder *coder, flag_model *model, bool flag)
{
    encoder_flag(coder, flag, model->chance);
    learn(model, flag);
}

INLINE bool decode_flag(range_decoder *coder, flag_model *model)
{
    bool flag = decoder_flag(coder, model->chance);
    learn(model, flag);
    return flag;
}

/* The rest of a step of more than 1. */
static bool encode_long_step(range_encoder *coder, flag_model *flags, uint64_t step)
{
    encode_flag(coder, &flags[1], step > 2);
    if (step == 2)
        return true;
    unsigned length = 63 - (unsigned)__builtin_clzll(step - 2);
    for (unsigned number = 0; number <= length; number++) {
        if (!encoder_reserve(coder))
            return false;
        encode_flag(coder, &flags[2 + number], number < length);
    }
    for (unsigned low = 0; low < length; low += RAW_BITS) {
        unsigned width = length - low < RAW_BITS ? length - low : RAW_BITS;
        if (!encoder_reserve(coder))
            return false;
        encoder_raw(coder, (step - 2) >> low & (((uint64_t)1 << width) - 1), width);
    }
    return encoder_reserve(coder);
}

INLINE bool encode_steps(range_encoder *coder, step_model *model, const scheme *type, const uint8_t *old_cells,
                         const uint8_t *new_cells, size_t count, uint8_t *signs, uint32_t cell_bytes)
{
    bool by_class = type->classes > 1;
    memset(signs, 0, (count + 7) / 8);
    for (size_t n = 0; n < count; n++) {
        uint64_t old = load_cell(old_cells + n * cell_bytes, cell_bytes);
        uint64_t before = ordered(old, type->order, cell_bytes);
        uint64_t after = ordered(load_cell(new_cells + n * cell_bytes, cell_bytes), type->order, cell_bytes);
        uint64_t step = after > before ? after - before : before - after;
        flag_model *flags = model->flags[by_class ? class_of(old, type) : 0];
        signs[n >> 3] |= (uint8_t)((after > before) << (n & 7));
        if (!encoder_reserve(coder))
            return false;
        encode_flag(coder, &flags[0], step > 1);
        if (step > 1 && !encode_long_step(coder, flags, step))
            return false;
    }
    return encoder_reserve(coder);
}

outcome encode_values(const scheme *type, const uint8_t *old_cells, const uint8_t *new_cells, size_t count,
                      uint8_t *signs, byte_string *stream)
{
    range_encoder coder;
    step_model model;
    bool done = false;
    if (!encoder_open(&coder, count / 4 + 64))
        return NO_MEMORY;
    open_model(&model);
#define ENCODE(size) \
    case size: \
        done = encode_steps(&coder, &model, type, old_cells, new_cells, count, signs, size); \
        break;
    switch (type->cell_bytes) {
        ENCODE(1)
        ENCODE(2)
        ENCODE(4)
        ENCODE(8)
    }
#undef ENCODE
    if (!done) {
        free(coder.data);
        return NO_MEMORY;
    }
    encoder_close(&coder, stream);
    return DONE;
}

/* Step sizes of more than 1; false where no step of the type is coded. */
static bool decode_long_step(range_decoder *coder, flag_model *flags, uint64_t limit, uint64_t *step)
{
    *step = 2;
    if (!decode_flag(coder, &flags[1]))
        return true;
    unsigned length = 0;
    while (decode_flag(coder, &flags[2 + length]))
        if (++length > MAX_LENGTH || limit >> length == 0)
            return false;
    uint64_t rest = (uint64_t)1 << length;
    for (unsigned low = 0; low < length; low += RAW_BITS) {
        unsigned width = length - low < RAW_BITS ? length - low : RAW_BITS;
        uint64_t digit;
        if (!decoder_raw(coder, width, &digit))
            return false;
        rest |= digit << low;
    }
    *step = rest + 2;
    return rest <= limit - 2;
}

INLINE outcome decode_steps(range_decoder *coder, step_model *model, const scheme *type, const uint8_t *signs,
                            const uint8_t *old_cells, size_t count, uint8_t *new_cells, uint32_t cell_bytes)
{
    bool by_class = type->classes > 1;
    uint64_t limit = widest(cell_bytes);
    for (size_t n = 0; n < count; n++) {
        uint64_t old = load_cell(old_cells + n * cell_bytes, cell_bytes);
        uint64_t before = ordered(old, type->order, cell_bytes);
        flag_model *flags = model->flags[by_class ? class_of(old, type) : 0];
        uint64_t step = 1;
        if (decode_flag(coder, &flags[0]) && !decode_long_step(coder, flags, limit, &step))
            return OVERSIZED_STEP;
        bool grew = signs[n >> 3] >> (n & 7) & 1;
        if (step > (grew ? limit - before : before))
            return OVERSIZED_STEP;
        uint64_t after = grew ? before + step : before - step;
        store_cell(new_cells + n * cell_bytes, unordered(after, type->order, cell_bytes), cell_bytes);
    }
    return decoder_ended(coder) ? DONE : WRONG_LENGTH;
}

outcome decode_values(const scheme *type, const uint8_t *signs, const uint8_t *stream, size_t stream_bytes,
                      const uint8_t *old_cells, size_t count, uint8_t *new_cells)
{
    range_decoder coder;
    step_model model;
    if (count & 7 && signs[count >> 3] >> (count & 7))
        return SURPLUS_SIGNS;
    decoder_open(&coder, stream, stream_bytes);
    open_model(&model);
    switch (type->cell_bytes) {
    case 1:
        return decode_steps(&coder, &model, type, signs, old_cells, count, new_cells, 1);
    case 2:
        return decode_steps(&coder, &model, type, signs, old_cells, count, new_cells, 2);
    case 4:
        return decode_steps(&coder, &model, type, signs, old_cells, count, new_cells, 4);
    default:
        return decode_steps(&coder, &model, type, signs, old_cells, count, new_cells, 8);
    }
}
