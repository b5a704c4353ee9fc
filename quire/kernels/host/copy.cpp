/* Several short copies in one call; quire/functional/copies.py has the same by PyTorch's, a call for each. */

#include <string.h>

#include "host.h"

typedef struct {
    void *to;
    const void *from;
    int64_t bytes;
} Copy;

EXPORT int64_t quire_copy_size(void) { return sizeof(Copy); }

EXPORT void quire_copy(const Copy *copies, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        memcpy(copies[i].to, copies[i].from, (size_t)copies[i].bytes);
}
