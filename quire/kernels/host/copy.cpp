/* Several short copies in one call; quire/functional/copies.py has the same by PyTorch's, a call for each. */

#include <string.h>

#include "host.h"

typedef struct {
    int64_t to, from; /* addresses */
    int64_t bytes;
} Copy;

EXPORT void quire_copy(const Copy *copies, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        memcpy((void *)(intptr_t)copies[i].to, (const void *)(intptr_t)copies[i].from, (size_t)copies[i].bytes);
}
