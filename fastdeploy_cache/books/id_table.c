/* Who owns each block of a pool: the fast half of fastdeploy_cache/books/id_table.py, which says what is promised, and
 * which is the same in Python. A part of the module `_native.c`.
 *
 * A byte for each block says who owns it. Blocks are counted in groups, so that the lowest free one is found by a walk
 * over the groups and one over the blocks of a group.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#define FREE 0
#define NUM_OWNERS 6 /* of `Owner` in block_pool.py */
#define MOVING 0xFF  /* of nobody, while ids are moved: so that one that is given twice is seen */
#define GROUP 128    /* blocks; a byte counts those that are free */

typedef struct {
    PyObject_HEAD
    PyObject *owners;  /* a bytearray, which `exported` keeps from being resized */
    Py_buffer exported;
    PyObject *one;     /* an array of one id: repeated, the cheapest way to a new array */
    uint8_t *num_free_in;
    Py_ssize_t num_groups, low; /* no group below `low` has a free block */
    Py_ssize_t counts[NUM_OWNERS];
} IdTable;

static PyObject *table_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    Py_ssize_t num_blocks;
    static char *names[] = {"num_blocks", NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "n", names, &num_blocks)) {
        return NULL;
    }
    if (num_blocks < 0 || num_blocks > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a table of ids has 0 to 2**31 - 1 blocks");
        return NULL;
    }
    IdTable *self = (IdTable *)type->tp_alloc(type, 0); /* all zeros */
    PyObject *module = self != NULL ? PyImport_ImportModule("array") : NULL;
    if (module == NULL) {
        Py_XDECREF(self);
        return NULL;
    }
    self->one = PyObject_CallMethod(module, "array", "s(i)", "i", 0);
    Py_DECREF(module);
    self->num_groups = (num_blocks + GROUP - 1) / GROUP;
    self->num_free_in = PyMem_Malloc(self->num_groups + 1);
    self->owners = PyByteArray_FromStringAndSize(NULL, num_blocks);
    if (self->num_free_in == NULL) {
        PyErr_NoMemory();
    }
    if (self->one == NULL || self->num_free_in == NULL || self->owners == NULL ||
        PyObject_GetBuffer(self->owners, &self->exported, PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    memset(self->exported.buf, FREE, num_blocks);
    memset(self->num_free_in, GROUP, self->num_groups);
    if (num_blocks % GROUP) {
        self->num_free_in[self->num_groups - 1] = num_blocks % GROUP;
    }
    self->counts[FREE] = num_blocks;
    return (PyObject *)self;
}

static void table_dealloc(IdTable *self)
{
    PyBuffer_Release(&self->exported);
    Py_XDECREF(self->owners);
    Py_XDECREF(self->one);
    PyMem_Free(self->num_free_in);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* An owner's number, or -1 with an error set. */
static Py_ssize_t owner_of(PyObject *object)
{
    Py_ssize_t owner = PyLong_AsSsize_t(object);
    if (!PyErr_Occurred() && (owner < 0 || owner >= NUM_OWNERS)) {
        PyErr_Format(PyExc_ValueError, "an owner is 0 to %d, not %zd", NUM_OWNERS - 1, owner);
    }
    return PyErr_Occurred() ? -1 : owner;
}

static PyObject *table_take(IdTable *self, PyObject *const *arguments, Py_ssize_t num_arguments)
{
    if (num_arguments != 2) {
        PyErr_SetString(PyExc_TypeError, "take wants a number of blocks and their owner");
        return NULL;
    }
    Py_ssize_t num_blocks = PyLong_AsSsize_t(arguments[0]);
    Py_ssize_t owner = PyErr_Occurred() ? -1 : owner_of(arguments[1]);
    if (owner < 0) {
        return NULL;
    }
    if (num_blocks < 0 || num_blocks > self->counts[FREE] || owner == FREE) {
        PyErr_Format(PyExc_ValueError, "%zd blocks for owner %zd of %zd free ones", num_blocks, owner,
                     self->counts[FREE]);
        return NULL;
    }
    PyObject *array = PySequence_Repeat(self->one, num_blocks); /* first: it may need memory */
    Py_buffer ids;
    if (array == NULL || PyObject_GetBuffer(array, &ids, PyBUF_WRITABLE) < 0) {
        Py_XDECREF(array);
        return NULL;
    }
    uint8_t *owners = self->exported.buf;
    int32_t *out = ids.buf;
    for (Py_ssize_t num_left = num_blocks; num_left > 0; self->low++) {
        Py_ssize_t num_here = self->num_free_in[self->low];
        if (num_here == 0) {
            continue;
        }
        num_here = num_here < num_left ? num_here : num_left;
        num_left -= num_here;
        self->num_free_in[self->low] -= (uint8_t)num_here;
        for (Py_ssize_t block = self->low * GROUP; num_here > 0 && block < self->exported.len; block++) {
            if (owners[block] == FREE) {
                owners[block] = (uint8_t)owner;
                *out++ = (int32_t)block;
                num_here--;
            }
        }
        if (num_left == 0) {
            break; /* this group may have more */
        }
    }
    PyBuffer_Release(&ids);
    self->counts[FREE] -= num_blocks;
    self->counts[owner] += num_blocks;
    return array;
}

static PyObject *table_move(IdTable *self, PyObject *const *arguments, Py_ssize_t num_arguments)
{
    if (num_arguments != 3) {
        PyErr_SetString(PyExc_TypeError, "move wants ids, who has them and who gets them");
        return NULL;
    }
    Py_ssize_t giver = owner_of(arguments[1]);
    Py_ssize_t taker = giver < 0 ? -1 : owner_of(arguments[2]);
    Py_buffer buffer;
    if (taker < 0 || PyObject_GetBuffer(arguments[0], &buffer, PyBUF_ND | PyBUF_FORMAT) < 0) {
        return NULL;
    }
    if (buffer.itemsize != sizeof(int32_t) || buffer.ndim != 1 || strcmp(buffer.format, "i") != 0) {
        PyBuffer_Release(&buffer);
        PyErr_SetString(PyExc_TypeError, "ids are an array of the type 'i'");
        return NULL;
    }
    const int32_t *ids = buffer.buf;
    Py_ssize_t num_blocks = self->exported.len, num_ids = buffer.len / (Py_ssize_t)sizeof(int32_t), num_good = 0;
    uint8_t *owners = self->exported.buf;
    while (num_good < num_ids) {
        int32_t block = ids[num_good];
        if (block < 0 || block >= num_blocks || owners[block] != giver) {
            break;
        }
        owners[block] = MOVING;
        num_good++;
    }
    int is_good = num_good == num_ids;
    for (Py_ssize_t i = 0; i < num_good; i++) {
        owners[ids[i]] = (uint8_t)(is_good ? taker : giver);
    }
    if (is_good && giver != taker) {
        self->counts[giver] -= num_ids;
        self->counts[taker] += num_ids;
        for (Py_ssize_t i = 0; i < num_ids && (giver == FREE || taker == FREE); i++) {
            Py_ssize_t group = ids[i] / GROUP;
            self->num_free_in[group] += (uint8_t)(taker == FREE ? 1 : -1);
            self->low = taker == FREE && group < self->low ? group : self->low;
        }
    }
    PyBuffer_Release(&buffer);
    return PyBool_FromLong(is_good);
}

static PyObject *table_count(IdTable *self, PyObject *owner)
{
    Py_ssize_t found = owner_of(owner);
    return found < 0 ? NULL : PyLong_FromSsize_t(self->counts[found]);
}

static PyMemberDef table_members[] = {
    {"num_free", T_PYSSIZET, offsetof(IdTable, counts), READONLY, "How many are free."}, /* counts[FREE] */
    {NULL, 0, 0, 0, NULL},
};

static PyObject *table_owners(IdTable *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->owners);
}

static PyMethodDef table_methods[] = {
    {"take", (PyCFunction)(void (*)(void))table_take, METH_FASTCALL, "The lowest free ids, for an owner."},
    {"move", (PyCFunction)(void (*)(void))table_move, METH_FASTCALL, "From an owner to another: all or none."},
    {"count", (PyCFunction)table_count, METH_O, "How many blocks an owner has."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef table_attributes[] = {
    {"owners", (getter)table_owners, NULL, "The owner of each block, a byte each; only to look at.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, table_methods},
    {Py_tp_getset, table_attributes},
    {Py_tp_members, table_members},
    {0, NULL},
};

static PyType_Spec table_spec = {
    .name = "fastdeploy_cache._native.IdTable",
    .basicsize = sizeof(IdTable),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = table_slots,
};

/* See `_native.c`. */
int add_id_table(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&table_spec);
    if (type == NULL) {
        return -1;
    }
    int failed = PyModule_AddObjectRef(module, "IdTable", type);
    Py_DECREF(type);
    return failed;
}
