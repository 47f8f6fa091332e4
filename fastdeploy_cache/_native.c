/* The fast half of fastdeploy_cache/tokens.py: a list of token ids as packed little-endian int32.
 *
 * Never needed: where it was not built, Python does the same. It takes lists and tuples of plain integers only, and
 * answers None for all else, so that one place alone decides what is accepted and words the errors.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define MAX_TOKEN_ID 0x7fffffffL
#define TOKEN_BYTES 4

/* The token id that an object is, or -1. Small integers are read where they lie, the others are asked for. */
static long token_id_of(PyObject *object)
{
    if (!PyLong_CheckExact(object)) {
        return -1;
    }
#if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact((PyLongObject *)object)) {
        Py_ssize_t value = PyUnstable_Long_CompactValue((PyLongObject *)object);
        return 0 <= value && value <= MAX_TOKEN_ID ? (long)value : -1;
    }
#else
    if (Py_SIZE(object) == 1) {
        return (long)((PyLongObject *)object)->ob_digit[0];
    }
#endif
    int overflow;
    long value = PyLong_AsLongAndOverflow(object, &overflow);
    return overflow == 0 && 0 <= value && value <= MAX_TOKEN_ID ? value : -1;
}

static PyObject *pack_list(PyObject *module, PyObject *token_ids)
{
    PyObject **items;
    Py_ssize_t num_tokens;
    if (PyList_CheckExact(token_ids)) {
        items = ((PyListObject *)token_ids)->ob_item;
        num_tokens = PyList_GET_SIZE(token_ids);
    } else if (PyTuple_CheckExact(token_ids)) {
        items = ((PyTupleObject *)token_ids)->ob_item;
        num_tokens = PyTuple_GET_SIZE(token_ids);
    } else {
        Py_RETURN_NONE;
    }
    PyObject *packed = PyBytes_FromStringAndSize(NULL, num_tokens * TOKEN_BYTES);
    if (packed == NULL) {
        return NULL;
    }
    unsigned char *out = (unsigned char *)PyBytes_AS_STRING(packed);
    /* No code of anybody else runs in this loop: the list stays as it is. */
    for (Py_ssize_t i = 0; i < num_tokens; i++, out += TOKEN_BYTES) {
        long token_id = token_id_of(items[i]);
        if (token_id < 0) {
            Py_DECREF(packed);
            Py_RETURN_NONE;
        }
        out[0] = (unsigned char)token_id;
        out[1] = (unsigned char)(token_id >> 8);
        out[2] = (unsigned char)(token_id >> 16);
        out[3] = (unsigned char)(token_id >> 24);
    }
    return packed;
}

static PyMethodDef methods[] = {
    {"pack_list", pack_list, METH_O, "The tokens of a list or tuple of plain integers, 0 to 2**31 - 1; else None."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef native = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "fastdeploy_cache._native",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&native);
}
