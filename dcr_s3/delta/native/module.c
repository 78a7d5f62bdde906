/* The kernels as a Python module: unpacks buffers, lets other threads run, wraps results.
 *
 * Callers are in this package alone; what they pass is checked nevertheless, for a wrong size would be a wild write.
 */
#include "buffers.h"

#include <stdlib.h>

/* The stream as bytes; frees it. */
static PyObject *take_stream(byte_string *stream)
{
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)stream->data, (Py_ssize_t)stream->size);
    free(stream->data);
    return bytes;
}

static PyObject *failure(outcome result)
{
    if (result == NO_MEMORY)
        return PyErr_NoMemory();
    PyErr_SetString(PyExc_ValueError, "positions are not ascending cells that the hazards let change");
    return NULL;
}

static PyObject *py_set_survival(PyObject *self, PyObject *args)
{
    Py_buffer table;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*", &table))
        return NULL;
    int sound = has_bytes(&table, (SURVIVAL_STEPS + 1) * sizeof(uint64_t));
    if (sound)
        set_survival(table.buf);
    PyBuffer_Release(&table);
    return sound ? Py_NewRef(Py_None) : NULL;
}

static PyObject *py_best_simd_level(PyObject *self, PyObject *args)
{
    (void)self, (void)args;
    return PyLong_FromLong(best_simd_level());
}

static PyObject *py_set_simd_level(PyObject *self, PyObject *args)
{
    int level;
    (void)self;
    if (!PyArg_ParseTuple(args, "i", &level))
        return NULL;
    set_simd_level(level);
    return Py_NewRef(Py_None);
}

static PyObject *py_tally(PyObject *self, PyObject *args)
{
    PyObject *old_cells, *new_cells, *result = NULL;
    Py_buffer packed, cells, changed;
    held_block old = {0}, new = {0};
    scheme type;
    unsigned stride_log2;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOy*Iw*w*", &old_cells, &new_cells, &packed, &stride_log2, &cells, &changed))
        return NULL;
    size_t bytes;
    if (read_scheme(&packed, &type) && (bytes = (type.exponent_mask + 1) * sizeof(uint64_t)) && stride_log2 <= 16 &&
        has_bytes(&cells, bytes) && has_bytes(&changed, bytes) &&
        hold_block(old_cells, type.cell_bytes, PyBUF_SIMPLE, &old) &&
        hold_block(new_cells, type.cell_bytes, PyBUF_SIMPLE, &new)) {
        Py_BEGIN_ALLOW_THREADS
        tally(&old.cells, &new.cells, &type, stride_log2, cells.buf, changed.buf);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release_block(&old);
    release_block(&new);
    PyBuffer_Release(&packed);
    PyBuffer_Release(&cells);
    PyBuffer_Release(&changed);
    return result;
}

static PyObject *py_count_exponents(PyObject *self, PyObject *args)
{
    Py_buffer cells, packed, counts;
    PyObject *result = NULL;
    scheme type;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*w*", &cells, &packed, &counts))
        return NULL;
    if (read_scheme(&packed, &type) && has_bytes(&counts, (type.exponent_mask + 1) * sizeof(uint64_t))) {
        Py_BEGIN_ALLOW_THREADS
        count_exponents(cells.buf, (size_t)cells.len / type.cell_bytes, &type, counts.buf);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&cells);
    PyBuffer_Release(&packed);
    PyBuffer_Release(&counts);
    return result;
}

/* (count, whether all were written, stream or None) */
static PyObject *py_scan(PyObject *self, PyObject *args)
{
    PyObject *old_cells, *new_cells, *answer = NULL;
    Py_buffer packed, positions, before, after;
    held_block old = {0}, new = {0};
    scheme type;
    int coded;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOy*w*w*w*p", &old_cells, &new_cells, &packed, &positions, &before, &after, &coded))
        return NULL;
    if (read_scheme(&packed, &type) && hold_block(old_cells, type.cell_bytes, PyBUF_SIMPLE, &old) &&
        hold_block(new_cells, type.cell_bytes, PyBUF_SIMPLE, &new) &&
        has_bytes(&before, (size_t)positions.len / 4 * type.cell_bytes) &&
        has_bytes(&after, (size_t)positions.len / 4 * type.cell_bytes)) {
        change_list changes = {positions.buf, before.buf, after.buf, (size_t)positions.len / 4, 0};
        byte_string stream = {NULL, 0};
        outcome result = DONE;
        Py_BEGIN_ALLOW_THREADS
        if (coded)
            result = scan_positions(&old.cells, &new.cells, &type, &changes, &stream);
        else
            scan(&old.cells, &new.cells, type.cell_bytes, &changes);
        Py_END_ALLOW_THREADS
        PyObject *bytes = result != DONE ? failure(result) : coded ? take_stream(&stream) : Py_NewRef(Py_None);
        if (bytes)
            answer = Py_BuildValue("nNN", (Py_ssize_t)changes.count, PyBool_FromLong(changes.capacity > 0), bytes);
    }
    release_block(&old);
    release_block(&new);
    PyBuffer_Release(&packed);
    PyBuffer_Release(&positions);
    PyBuffer_Release(&before);
    PyBuffer_Release(&after);
    return answer;
}

static PyObject *py_encode_positions(PyObject *self, PyObject *args)
{
    PyObject *cells, *bytes = NULL;
    Py_buffer packed, positions;
    held_block held = {0};
    scheme type;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oy*y*", &cells, &packed, &positions))
        return NULL;
    if (read_scheme(&packed, &type) && hold_block(cells, type.cell_bytes, PyBUF_SIMPLE, &held)) {
        byte_string stream = {NULL, 0};
        outcome result;
        Py_BEGIN_ALLOW_THREADS
        result = encode_positions(&held.cells, &type, positions.buf, (size_t)positions.len / 4, &stream);
        Py_END_ALLOW_THREADS
        bytes = result == DONE ? take_stream(&stream) : failure(result);
    }
    release_block(&held);
    PyBuffer_Release(&packed);
    PyBuffer_Release(&positions);
    return bytes;
}

/* Writes positions and old cells; the outcome as a number. */
static PyObject *py_decode_positions(PyObject *self, PyObject *args)
{
    PyObject *cells, *answer = NULL;
    Py_buffer packed, stream, positions, before;
    held_block held = {0};
    scheme type;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oy*y*w*w*", &cells, &packed, &stream, &positions, &before))
        return NULL;
    size_t count = (size_t)positions.len / 4;
    if (read_scheme(&packed, &type) && hold_block(cells, type.cell_bytes, PyBUF_SIMPLE, &held) &&
        has_bytes(&before, count * type.cell_bytes)) {
        outcome result;
        Py_BEGIN_ALLOW_THREADS
        result = decode_positions(&held.cells, &type, stream.buf, (size_t)stream.len, count, positions.buf, before.buf);
        Py_END_ALLOW_THREADS
        answer = PyLong_FromLong(result);
    }
    release_block(&held);
    PyBuffer_Release(&packed);
    PyBuffer_Release(&stream);
    PyBuffer_Release(&positions);
    PyBuffer_Release(&before);
    return answer;
}

/* Writes signs; the stream. */
static PyObject *py_encode_values(PyObject *self, PyObject *args)
{
    Py_buffer packed, before, after, signs;
    PyObject *bytes = NULL;
    scheme type;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*y*w*", &packed, &before, &after, &signs))
        return NULL;
    if (read_scheme(&packed, &type) && has_bytes(&after, (size_t)before.len) &&
        has_bytes(&signs, ((size_t)before.len / type.cell_bytes + 7) / 8)) {
        byte_string stream = {NULL, 0};
        outcome result;
        Py_BEGIN_ALLOW_THREADS
        result = encode_values(&type, before.buf, after.buf, (size_t)before.len / type.cell_bytes, signs.buf, &stream);
        Py_END_ALLOW_THREADS
        bytes = result == DONE ? take_stream(&stream) : failure(result);
    }
    PyBuffer_Release(&packed);
    PyBuffer_Release(&before);
    PyBuffer_Release(&after);
    PyBuffer_Release(&signs);
    return bytes;
}

/* Writes new cells; the outcome as a number. */
static PyObject *py_decode_values(PyObject *self, PyObject *args)
{
    Py_buffer packed, signs, stream, before, after;
    PyObject *answer = NULL;
    scheme type;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*y*y*w*", &packed, &signs, &stream, &before, &after))
        return NULL;
    if (read_scheme(&packed, &type) && has_bytes(&after, (size_t)before.len) &&
        has_bytes(&signs, ((size_t)before.len / type.cell_bytes + 7) / 8)) {
        outcome result;
        Py_BEGIN_ALLOW_THREADS
        result = decode_values(&type, signs.buf, stream.buf, (size_t)stream.len, before.buf,
                               (size_t)before.len / type.cell_bytes, after.buf);
        Py_END_ALLOW_THREADS
        answer = PyLong_FromLong(result);
    }
    PyBuffer_Release(&packed);
    PyBuffer_Release(&signs);
    PyBuffer_Release(&stream);
    PyBuffer_Release(&before);
    PyBuffer_Release(&after);
    return answer;
}

/* Writes `values` into `dest`; the outcome as a number. */
static PyObject *py_apply_changes(PyObject *self, PyObject *args)
{
    PyObject *dest, *answer = NULL;
    Py_buffer positions, values;
    held_block held = {0};
    unsigned cell_bytes;
    (void)self;
    if (!PyArg_ParseTuple(args, "OIy*y*", &dest, &cell_bytes, &positions, &values))
        return NULL;
    if (cell_bytes && has_bytes(&values, (size_t)positions.len / 4 * cell_bytes) &&
        hold_block(dest, cell_bytes, PyBUF_WRITABLE, &held)) {
        outcome result;
        Py_BEGIN_ALLOW_THREADS
        result = apply_changes(&held.cells, cell_bytes, positions.buf, values.buf, (size_t)positions.len / 4);
        Py_END_ALLOW_THREADS
        answer = PyLong_FromLong(result);
    }
    release_block(&held);
    PyBuffer_Release(&positions);
    PyBuffer_Release(&values);
    return answer;
}

static PyObject *sums_of(const uint64_t sums[2])
{
    return Py_BuildValue("KK", (unsigned long long)sums[0], (unsigned long long)sums[1]);
}

static PyObject *py_digest_range(PyObject *self, PyObject *args)
{
    uint32_t key[4];
    uint64_t sums[2];
    unsigned long long start;
    unsigned cell_bytes;
    Py_buffer cells;
    (void)self;
    if (!PyArg_ParseTuple(args, "(IIII)Ky*I", &key[0], &key[1], &key[2], &key[3], &start, &cells, &cell_bytes))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    digest_range(key, start, cells.buf, (size_t)cells.len / cell_bytes, cell_bytes, sums);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&cells);
    return sums_of(sums);
}

static PyObject *py_digest_at(PyObject *self, PyObject *args)
{
    uint32_t key[4];
    uint64_t sums[2];
    unsigned cell_bytes;
    Py_buffer indices, cells;
    (void)self;
    if (!PyArg_ParseTuple(args, "(IIII)y*y*I", &key[0], &key[1], &key[2], &key[3], &indices, &cells, &cell_bytes))
        return NULL;
    int sound = has_bytes(&cells, (size_t)indices.len / 8 * cell_bytes);
    if (sound) {
        Py_BEGIN_ALLOW_THREADS
        digest_at(key, indices.buf, cells.buf, (size_t)indices.len / 8, cell_bytes, sums);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&indices);
    PyBuffer_Release(&cells);
    return sound ? sums_of(sums) : NULL;
}

static PyMethodDef methods[] = {
    {"set_survival", py_set_survival, METH_VARARGS, NULL},
    {"best_simd_level", py_best_simd_level, METH_NOARGS, NULL},
    {"set_simd_level", py_set_simd_level, METH_VARARGS, NULL},
    {"tally", py_tally, METH_VARARGS, NULL},
    {"count_exponents", py_count_exponents, METH_VARARGS, NULL},
    {"scan", py_scan, METH_VARARGS, NULL},
    {"encode_positions", py_encode_positions, METH_VARARGS, NULL},
    {"decode_positions", py_decode_positions, METH_VARARGS, NULL},
    {"encode_values", py_encode_values, METH_VARARGS, NULL},
    {"decode_values", py_decode_values, METH_VARARGS, NULL},
    {"apply_changes", py_apply_changes, METH_VARARGS, NULL},
    {"digest_range", py_digest_range, METH_VARARGS, NULL},
    {"digest_at", py_digest_at, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Compiled kernels; see dcr_s3.delta.native.", -1, methods, NULL, NULL, NULL, NULL,
};

extern PyMethodDef places_methods[]; /* module_places.c */

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddFunctions(module, places_methods) < 0)
        Py_CLEAR(module);
    return module;
}
