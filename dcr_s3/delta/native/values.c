/* Steps between old and new cells: raw signs, and sizes as adaptive flags in a range-coded stream. */
#include "rangecoder.h"
#include "targets.h"

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

#define LEVEL(name) name##_plain
#include "values_level.h"
#undef LEVEL

#if defined(__x86_64__)
#define LEVEL(name) name##_avx2
BEGIN_TARGET("avx2,bmi,bmi2,lzcnt,popcnt")
#include "values_level.h"
END_TARGET
#undef LEVEL
#endif

outcome encode_values(const scheme *type, const uint8_t *old_cells, const uint8_t *new_cells, size_t count,
                      uint8_t *signs, byte_string *stream)
{
    range_encoder coder;
    step_model model;
    bool done = false;
    if (!encoder_open(&coder, count / 4 + 64))
        return NO_MEMORY;
    open_model(&model);
#if defined(__x86_64__)
    if (simd_level() > 0)
        done = encode_avx2(&coder, &model, type, old_cells, new_cells, count, signs);
    else
#endif
        done = encode_plain(&coder, &model, type, old_cells, new_cells, count, signs);
    if (!done) {
        free(coder.data);
        return NO_MEMORY;
    }
    encoder_end(&coder);
    *stream = (byte_string){coder.data, coder.size};
    return DONE;
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
#if defined(__x86_64__)
    if (simd_level() > 0)
        return decode_avx2(coder, &model, type, signs, old_cells, count, new_cells);
#endif
    return decode_plain(coder, &model, type, signs, old_cells, count, new_cells);
}
