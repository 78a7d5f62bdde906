/* What Python passes, as the kernels want it: blocks, schemes, arrays that are large enough. */
#ifndef DCR_BUFFERS_H
#define DCR_BUFFERS_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <string.h>

#include "kernels.h"

typedef struct {
    Py_buffer *buffers;
    piece *pieces;
    Py_ssize_t count;
    block cells;
} held_block;

static void release_block(held_block *held)
{
    for (Py_ssize_t n = 0; n < held->count; n++)
        PyBuffer_Release(&held->buffers[n]);
    PyMem_Free(held->buffers);
    PyMem_Free(held->pieces);
    *held = (held_block){0};
}

/* Fills `held` from a sequence of buffers; on failure sets an exception and leaves it empty. */
static int hold_block(PyObject *sequence, uint32_t cell_bytes, int flags, held_block *held)
{
    *held = (held_block){0};
    Py_ssize_t count = PySequence_Size(sequence);
    if (count < 0)
        return 0;
    held->buffers = PyMem_Malloc((size_t)(count ? count : 1) * sizeof(Py_buffer));
    held->pieces = PyMem_Malloc((size_t)(count ? count : 1) * sizeof(piece));
    if (!held->buffers || !held->pieces) {
        PyErr_NoMemory();
        goto failed;
    }
    for (; held->count < count; held->count++) {
        Py_buffer *buffer = &held->buffers[held->count];
        PyObject *item = PySequence_GetItem(sequence, held->count);
        if (!item)
            goto failed;
        int got = PyObject_GetBuffer(item, buffer, flags);
        Py_DECREF(item);
        if (got < 0)
            goto failed;
        size_t cells = (size_t)buffer->len / cell_bytes;
        held->pieces[held->count] = (piece){buffer->buf, cells};
        held->cells.cells += cells;
    }
    held->cells.pieces = held->pieces;
    held->cells.count = (size_t)count;
    return 1;
failed:
    release_block(held);
    return 0;
}

/* Reads a packed scheme; on failure sets an exception. */
static inline int read_scheme(const Py_buffer *packed, scheme *type)
{
    if (packed->len != (Py_ssize_t)sizeof *type) {
        PyErr_SetString(PyExc_ValueError, "a scheme of another size");
        return 0;
    }
    memcpy(type, packed->buf, sizeof *type);
    uint32_t size = type->cell_bytes;
    int sound = (size == 1 || size == 2 || size == 4 || size == 8) && type->order <= FLOAT_ORDER &&
                type->exponent_shift < 8 * size && type->exponent_mask < MOST_EXPONENTS &&
                (type->classes == 1 || type->classes == CLASSES) && type->unit_bits >= 14 && type->unit_bits <= 24 &&
                type->halved <= 1;
    if (!sound)
        PyErr_SetString(PyExc_ValueError, "a scheme that no type has");
    return sound;
}

static int has_bytes(const Py_buffer *buffer, size_t bytes)
{
    if ((size_t)buffer->len >= bytes)
        return 1;
    PyErr_SetString(PyExc_ValueError, "an array is too small");
    return 0;
}

#endif
