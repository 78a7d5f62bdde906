/* Coding steps. Included once per instruction set. */

/* The rest of a step of more than 1; false where memory ran out. */
INLINE bool LEVEL(encode_long_step)(range_encoder *coder, flag_model *flags, uint64_t step)
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
    return true;
}

INLINE bool LEVEL(encode_steps)(range_encoder *coder, step_model *model, const scheme *type, const uint8_t *old_cells,
                                const uint8_t *new_cells, size_t count, uint8_t *signs, uint32_t cell_bytes)
{
    bool by_class = type->classes > 1, room = true;
    range_encoder local = *coder; /* nothing can alias it: it stays in registers */
    uint32_t order = type->order;
    memset(signs, 0, (count + 7) / 8);
    for (size_t n = 0; n < count && room; n++) {
        uint64_t old = load_cell(old_cells + n * cell_bytes, cell_bytes);
        uint64_t before = ordered(old, order, cell_bytes);
        uint64_t after = ordered(load_cell(new_cells + n * cell_bytes, cell_bytes), order, cell_bytes);
        uint64_t shrank = -(uint64_t)(after < before), step = ((after - before) ^ shrank) - shrank;
        flag_model *flags = model->flags[by_class ? class_of(old, type) : 0];
        signs[n >> 3] |= (uint8_t)((shrank + 1) << (n & 7));
        room = encoder_reserve(&local);
        if (!room)
            break;
        encode_flag(&local, &flags[0], step > 1);
        if (step > 1)
            room = LEVEL(encode_long_step)(&local, flags, step);
    }
    room = room && encoder_reserve(&local);
    *coder = local;
    return room;
}

static bool LEVEL(encode)(range_encoder *coder, step_model *model, const scheme *type, const uint8_t *old_cells,
                          const uint8_t *new_cells, size_t count, uint8_t *signs)
{
    switch (type->cell_bytes) {
    case 1:
        return LEVEL(encode_steps)(coder, model, type, old_cells, new_cells, count, signs, 1);
    case 2:
        return LEVEL(encode_steps)(coder, model, type, old_cells, new_cells, count, signs, 2);
    case 4:
        return LEVEL(encode_steps)(coder, model, type, old_cells, new_cells, count, signs, 4);
    default:
        return LEVEL(encode_steps)(coder, model, type, old_cells, new_cells, count, signs, 8);
    }
}

/* A step of more than 1, at most `limit`; false where none is coded. */
INLINE bool LEVEL(decode_long_step)(range_decoder *coder, flag_model *flags, uint64_t limit, uint64_t *step)
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

INLINE outcome LEVEL(decode_steps)(range_decoder coder, step_model *model, const scheme *type, const uint8_t *signs,
                                   const uint8_t *old_cells, size_t count, uint8_t *new_cells, uint32_t cell_bytes)
{
    bool by_class = type->classes > 1;
    uint32_t order = type->order;
    uint64_t limit = widest(cell_bytes);
    for (size_t n = 0; n < count; n++) {
        uint64_t old = load_cell(old_cells + n * cell_bytes, cell_bytes);
        uint64_t before = ordered(old, order, cell_bytes);
        flag_model *flags = model->flags[by_class ? class_of(old, type) : 0];
        uint64_t step = 1, shrank = (uint64_t)(signs[n >> 3] >> (n & 7) & 1) - 1;
        if (decode_flag(&coder, &flags[0]) && !LEVEL(decode_long_step)(&coder, flags, limit, &step))
            return OVERSIZED_STEP;
        /* A step down from x is a step up from limit - x. */
        uint64_t mirror = shrank & limit, after = (before ^ mirror) + step;
        if (step > limit - (before ^ mirror))
            return OVERSIZED_STEP;
        store_cell(new_cells + n * cell_bytes, unordered(after ^ mirror, order, cell_bytes), cell_bytes);
    }
    return decoder_ended(&coder) ? DONE : WRONG_LENGTH;
}

static outcome LEVEL(decode)(range_decoder coder, step_model *model, const scheme *type, const uint8_t *signs,
                             const uint8_t *old_cells, size_t count, uint8_t *new_cells)
{
    switch (type->cell_bytes) {
    case 1:
        return LEVEL(decode_steps)(coder, model, type, signs, old_cells, count, new_cells, 1);
    case 2:
        return LEVEL(decode_steps)(coder, model, type, signs, old_cells, count, new_cells, 2);
    case 4:
        return LEVEL(decode_steps)(coder, model, type, signs, old_cells, count, new_cells, 4);
    default:
        return LEVEL(decode_steps)(coder, model, type, signs, old_cells, count, new_cells, 8);
    }
}
