/* Prepared places as Python objects: capsules that hold the buffers they lead into. */
#include "buffers.h"

#include "places.h"

static const char NAME[] = "dcr_s3.places";

typedef struct {
    held_block held;
    places at;
} held_places;

static void release_places(held_places *object)
{
    close_places(&object->at);
    release_block(&object->held);
    PyMem_Free(object);
}

static void free_capsule(PyObject *capsule)
{
    release_places(PyCapsule_GetPointer(capsule, NAME));
}

/* A capsule; None where positions are not strictly ascending cells. */
static PyObject *py_open_places(PyObject *self, PyObject *args)
{
    PyObject *cells, *capsule = NULL;
    Py_buffer positions;
    unsigned cell_bytes;
    (void)self;
    if (!PyArg_ParseTuple(args, "OIy*", &cells, &cell_bytes, &positions))
        return NULL;
    held_places *object = PyMem_Calloc(1, sizeof *object);
    outcome result = NO_MEMORY;
    if (!object)
        PyErr_NoMemory();
    else if (cell_bytes != 1 && cell_bytes != 2 && cell_bytes != 4 && cell_bytes != 8)
        PyErr_SetString(PyExc_ValueError, "cells of a size that no type has");
    else if (hold_block(cells, cell_bytes, PyBUF_WRITABLE, &object->held)) {
        Py_BEGIN_ALLOW_THREADS
        result = open_places(&object->held.cells, cell_bytes, positions.buf, (size_t)positions.len / 8, &object->at);
        Py_END_ALLOW_THREADS
        if (result == DONE)
            capsule = PyCapsule_New(object, NAME, free_capsule);
        else
            capsule = result == BAD_POSITIONS ? Py_NewRef(Py_None) : PyErr_NoMemory();
    }
    if (object && (!capsule || result != DONE))
        release_places(object);
    PyBuffer_Release(&positions);
    return capsule;
}

static const held_places *read_arguments(PyObject *args, const char *format, Py_buffer *values, unsigned *threads)
{
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, format, &capsule, values, threads))
        return NULL;
    const held_places *object = PyCapsule_GetPointer(capsule, NAME);
    if (object && has_bytes(values, object->at.count * object->at.cell_bytes))
        return object;
    PyBuffer_Release(values);
    return NULL;
}

static PyObject *py_put_cells(PyObject *self, PyObject *args)
{
    Py_buffer values;
    unsigned threads;
    (void)self;
    const held_places *object = read_arguments(args, "Oy*I", &values, &threads);
    if (!object)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    put_cells(&object->at, values.buf, threads);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&values);
    return Py_NewRef(Py_None);
}

static PyObject *py_take_cells(PyObject *self, PyObject *args)
{
    Py_buffer values;
    unsigned threads;
    (void)self;
    const held_places *object = read_arguments(args, "Ow*I", &values, &threads);
    if (!object)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    take_cells(&object->at, values.buf, threads);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&values);
    return Py_NewRef(Py_None);
}

/* The number of places where there is none. */
static PyObject *py_first_other(PyObject *self, PyObject *args)
{
    Py_buffer values;
    unsigned threads;
    size_t found;
    (void)self;
    const held_places *object = read_arguments(args, "Oy*I", &values, &threads);
    if (!object)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    found = first_other(&object->at, values.buf, threads);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&values);
    return PyLong_FromSize_t(found);
}

PyMethodDef places_methods[] = {
    {"open_places", py_open_places, METH_VARARGS, NULL},
    {"put_cells", py_put_cells, METH_VARARGS, NULL},
    {"take_cells", py_take_cells, METH_VARARGS, NULL},
    {"first_other", py_first_other, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
