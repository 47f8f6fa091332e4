/* The fast halves of fastdeploy_cache/books/tokens.py, a list of token ids as packed little-endian int32, and of
 * fastdeploy_cache/books/block_marks.py, short marks of packed blocks. That of id_table.py has a file of its own.
 *
 * Never needed: where it was not built, Python does the same. Packing takes lists and tuples of plain integers and
 * arrays of int32 only, and answers None for all else, so that one place alone decides what is accepted and words the
 * errors.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

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

static inline uint64_t word_at(const unsigned char *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof(word));
    return word;
}

/* The tokens of an array of int32 in one dimension, in one piece; None: it is none, or one of them is negative. */
static PyObject *pack_array(PyObject *array)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(array, &buffer, PyBUF_ND | PyBUF_FORMAT) < 0) {
        PyErr_Clear(); /* a memory view of other strides, say: looked at by Python */
        Py_RETURN_NONE;
    }
    PyObject *packed = NULL;
    int is_plain = buffer.ndim == 1 && buffer.itemsize == TOKEN_BYTES && buffer.format != NULL;
    if (is_plain && strcmp(buffer.format, "i") == 0 && PY_LITTLE_ENDIAN) {
        packed = PyBytes_FromStringAndSize(buffer.buf, buffer.len);
        if (packed == NULL) {
            PyBuffer_Release(&buffer);
            return NULL;
        }
        /* The copy is looked at: whoever else writes into the array meanwhile changes nothing of what was looked at. */
        const unsigned char *bytes = (const unsigned char *)PyBytes_AS_STRING(packed);
        uint64_t all = 0;
        uint32_t last = 0;
        Py_ssize_t i = 0;
        for (; i + 8 <= buffer.len; i += 8) {
            all |= word_at(bytes + i);
        }
        memcpy(&last, bytes + i, buffer.len - i);
        if ((all | last) & 0x8000000080000000ULL) { /* the sign of one of them */
            Py_CLEAR(packed);
        }
    }
    PyBuffer_Release(&buffer);
    return packed != NULL ? packed : Py_NewRef(Py_None);
}

static PyObject *pack_plain(PyObject *module, PyObject *token_ids)
{
    PyObject **items;
    Py_ssize_t num_tokens;
    if (PyList_CheckExact(token_ids)) {
        items = ((PyListObject *)token_ids)->ob_item;
        num_tokens = PyList_GET_SIZE(token_ids);
    } else if (PyTuple_CheckExact(token_ids)) {
        items = ((PyTupleObject *)token_ids)->ob_item;
        num_tokens = PyTuple_GET_SIZE(token_ids);
    } else if (PyObject_CheckBuffer(token_ids)) {
        return pack_array(token_ids);
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

#ifndef __SIZEOF_INT128__
#error "needs a compiler with 128-bit integers; without this part Python does the same"
#endif

/* Both halves of the product, folded: as in wyhash (Wang Yi, 2019), the hash that multiplies the fewest times. */
static inline uint64_t product(uint64_t one, uint64_t other)
{
    unsigned __int128 whole = (unsigned __int128)one * other;
    return (uint64_t)whole ^ (uint64_t)(whole >> 64);
}

static inline uint64_t folded(uint64_t mark, uint64_t word)
{
    return product(mark ^ 0x8EBC6AF09C88C6E3ULL, word ^ 0xD6E8FEB86659FD93ULL);
}

/* A mark tells blocks apart; it proves nothing. In four chains, as each has to wait for its own product. All constants
 * have the highest bit of a word, which token ids leave clear: no word makes a factor 0, at which the other one would
 * be lost. */
static uint64_t mark_of(const unsigned char *block, Py_ssize_t num_bytes)
{
    uint64_t a = 0xC2B2AE3D27D4EB4FULL, b = 0xA5A3B1C8F9D2E671ULL;
    uint64_t c = 0xF1357AEA2E62A9C5ULL, d = 0x94D049BB133111EBULL;
    unsigned char last[64];
    for (Py_ssize_t num_left = num_bytes; num_left > 0; block += 64, num_left -= 64) {
        const unsigned char *bytes = block;
        if (num_left < 64) {
            memset(last, 0, 64);
            memcpy(last, block, num_left);
            bytes = last;
        }
        a = product(word_at(bytes) ^ 0xA0761D6478BD642FULL, word_at(bytes + 8) ^ a);
        b = product(word_at(bytes + 16) ^ 0xE7037ED1A0B428DBULL, word_at(bytes + 24) ^ b);
        c = product(word_at(bytes + 32) ^ 0xD89965557BDB6C11ULL, word_at(bytes + 40) ^ c);
        d = product(word_at(bytes + 48) ^ 0x9E3779B97F4A7C15ULL, word_at(bytes + 56) ^ d);
    }
    return folded(a, b) ^ product(c ^ 0xA0761D6478BD642FULL, d ^ (uint64_t)num_bytes);
}

/* The bytes of `tokens` in front of byte `start` that a key is made of, at most. */
#define WINDOW_BYTES 64

static PyObject *place_key(PyObject *module, PyObject *const *arguments, Py_ssize_t num_arguments)
{
    if (num_arguments != 5) {
        PyErr_SetString(PyExc_TypeError, "place_key takes a root's hash, a block, tokens, its first byte, its bytes");
        return NULL;
    }
    Py_ssize_t block = PyLong_AsSsize_t(arguments[1]);
    Py_ssize_t start = PyLong_AsSsize_t(arguments[3]);
    Py_ssize_t block_bytes = PyLong_AsSsize_t(arguments[4]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_buffer root, tokens;
    if (PyObject_GetBuffer(arguments[0], &root, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    if (PyObject_GetBuffer(arguments[2], &tokens, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&root);
        return NULL;
    }
    if (start < 0 || block_bytes <= 0 || start > tokens.len || block_bytes > tokens.len - start) {
        PyBuffer_Release(&root);
        PyBuffer_Release(&tokens);
        PyErr_SetString(PyExc_ValueError, "place_key of a block that lies outside of the packed tokens");
        return NULL;
    }
    const unsigned char *bytes = (const unsigned char *)tokens.buf + start;
    Py_ssize_t window = start < WINDOW_BYTES ? start : WINDOW_BYTES;
    uint64_t key = folded((uint64_t)block + 1, mark_of(root.buf, root.len));
    key = folded(key, mark_of(bytes - window, window));
    key = folded(key, mark_of(bytes, block_bytes));
    PyBuffer_Release(&root);
    PyBuffer_Release(&tokens);
    return PyLong_FromUnsignedLongLong(key);
}

static PyObject *block_marks(PyObject *module, PyObject *const *arguments, Py_ssize_t num_arguments)
{
    if (num_arguments != 4) {
        PyErr_SetString(PyExc_TypeError, "block_marks takes packed tokens, the first byte, blocks and bytes a block");
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(arguments[1]);
    Py_ssize_t num_blocks = PyLong_AsSsize_t(arguments[2]);
    Py_ssize_t block_bytes = PyLong_AsSsize_t(arguments[3]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_buffer tokens;
    if (PyObject_GetBuffer(arguments[0], &tokens, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    if (start < 0 || num_blocks < 0 || block_bytes <= 0 || start > tokens.len ||
        num_blocks > (tokens.len - start) / block_bytes) {
        PyBuffer_Release(&tokens);
        PyErr_SetString(PyExc_ValueError, "block_marks of blocks that lie outside of the packed tokens");
        return NULL;
    }
    PyObject *marks = PyBytes_FromStringAndSize(NULL, num_blocks * (Py_ssize_t)sizeof(uint32_t));
    if (marks != NULL) {
        char *out = PyBytes_AS_STRING(marks);
        const unsigned char *block = (const unsigned char *)tokens.buf + start;
        for (Py_ssize_t i = 0; i < num_blocks; i++, block += block_bytes, out += sizeof(uint32_t)) {
            uint32_t mark = (uint32_t)(mark_of(block, block_bytes) >> 32);
            memcpy(out, &mark, sizeof(uint32_t));
        }
    }
    PyBuffer_Release(&tokens);
    return marks;
}

static PyMethodDef methods[] = {
    {"block_marks", (PyCFunction)(void (*)(void))block_marks, METH_FASTCALL, "Four bytes for each of some blocks."},
    {"pack_plain", pack_plain, METH_O, "The tokens of a list, tuple or array of int32, 0 to 2**31 - 1; else None."},
    {"place_key", (PyCFunction)(void (*)(void))place_key, METH_FASTCALL, "64 bits for a block at its place."},
    {NULL, NULL, 0, NULL},
};

int add_id_table(PyObject *module); /* books/id_table.c */

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_id_table},
    {0, NULL},
};

static struct PyModuleDef native = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "fastdeploy_cache._native",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&native);
}
