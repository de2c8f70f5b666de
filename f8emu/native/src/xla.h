/* The part of XLA's foreign function interface that xla.c reads, in names of our own.

   jaxlib is not there when the engine is built, so its header is not included. These layouts are fixed by the binary
   interface, version 0.1 and up: XLA only appends. tests/native/test_xla.py compiles them against the header of the
   jaxlib that is installed. */
#ifndef F8EMU_XLA_H
#define F8EMU_XLA_H

#include <stddef.h>
#include <stdint.h>

enum { XLA_MAJOR = 0, XLA_OLDEST_MINOR = 3 /* jaxlib 0.10.0 */ };

enum { XLA_IS_METADATA_QUERY = 1 }; /* kinds of extensions */
enum { XLA_IS_BUFFER = 1 };         /* kinds of operands and of results */
enum { XLA_IS_ARRAY = 1 };          /* kinds of attributes */
enum { XLA_EXECUTE = 3 };           /* stages */

enum { XLA_INVALID_ARGUMENT = 3, XLA_RESOURCE_EXHAUSTED = 8 }; /* kinds of errors */

enum { /* dtypes */
    XLA_INT32 = 4,
    XLA_UINT8 = 6,
    XLA_FLOAT16 = 10,
    XLA_FLOAT32 = 11,
    XLA_BFLOAT16 = 16,
    XLA_E5M2 = 19,
    XLA_E4M3FN = 20,
    XLA_E5M2FNUZ = 24,
    XLA_E4M3FNUZ = 25,
    XLA_E8M0FNU = 33
};

/* Every struct of the interface begins with its size, for versions that append, and most with extensions. */
typedef struct xla_extension {
    size_t size;
    int32_t kind;
    struct xla_extension *next;
} xla_extension;

typedef struct {
    size_t size;
    xla_extension *extensions;
    int32_t major, minor;
} xla_version;

typedef struct {
    size_t size;
    xla_version version;
    uint32_t traits;
    int64_t state_type; /* 0: a handler without state */
} xla_metadata;

/* What a call carries that only asks which version the handler was written for. */
typedef struct {
    xla_extension base;
    xla_metadata *answer;
} xla_metadata_query;

typedef struct {
    size_t size;
    xla_extension *extensions;
    int32_t dtype;
    void *data;
    int64_t rank;
    const int64_t *extents;
} xla_buffer;

/* Operands, or results. */
typedef struct {
    size_t size;
    xla_extension *extensions;
    int64_t count;
    const int32_t *kinds;
    void **items;
} xla_values;

typedef struct {
    const char *text;
    size_t length;
} xla_name;

typedef struct {
    int32_t dtype;
    size_t count;
    const void *data;
} xla_array;

/* In the order of their names. */
typedef struct {
    size_t size;
    xla_extension *extensions;
    int64_t count;
    const int32_t *kinds;
    const xla_name *const *names;
    void **items;
} xla_attributes;

typedef struct {
    size_t size;
    xla_extension *extensions;
    const char *message;
    int32_t kind;
} xla_new_error;

typedef struct {
    size_t size;
    xla_extension *extensions;
    void *error;
} xla_old_error;

typedef struct {
    size_t size;
    xla_extension *extensions;
    void *context;
    int64_t *threads;
} xla_thread_count;

/* The functions of XLA that a handler may call; those that are not called here are holes. */
typedef struct {
    size_t size;
    xla_extension *extensions;
    xla_version version;
    const void *internal;
    void *(*new_error)(xla_new_error *);
    void (*hole)(void);
    void (*free_error)(xla_old_error *);
    void (*holes[9])(void);
    void *(*thread_count)(xla_thread_count *);
} xla_api;

/* A call. */
typedef struct {
    size_t size;
    xla_extension *extensions;
    const xla_api *api;
    void *context;
    int32_t stage;
    xla_values operands, results;
    xla_attributes attributes;
} xla_call;

#endif
