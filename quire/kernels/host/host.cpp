/* What Python asks before anything else. */

#include "host.h"

EXPORT int64_t quire_host_version(void) { return 3; }

EXPORT int64_t quire_padded(int64_t count) { return padded_to_groups(count); }

static int64_t most = 2;

/* Use no wider registers than these, so that tests see all variants. */
EXPORT void quire_limit_width(int64_t width) { most = width; }

EXPORT int64_t quire_width(void)
{
    int64_t width = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        width = __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") ? 2 : 1;
#endif
    return width < most ? width : most;
}
