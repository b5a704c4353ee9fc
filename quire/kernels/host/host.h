/* What the files of this folder share.
 *
 * A loop is a template that is compiled for several instruction sets, the parameter being how much of its work
 * fits into their registers; the widest that the processor has is chosen when it is called. */

#ifndef QUIRE_HOST_H
#define QUIRE_HOST_H

#include <stdint.h>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define AVX2 __attribute__((target("avx2,fma")))
#else
#define AVX512
#define AVX2
#endif

#define VARIANTS(name, parameters, arguments, widest, wider, plain)                                             \
    AVX512 static void name##_widest parameters { name<widest> arguments; }                                     \
    AVX2 static void name##_wider parameters { name<wider> arguments; }                                         \
    static void name##_plain parameters { name<plain> arguments; }
#define CHOOSE(name) (quire_width() > 1 ? name##_widest : quire_width() ? name##_wider : name##_plain)

/* 2 for registers of 512 bits, 1 for 256, 0 for what every processor has. */
EXPORT int64_t quire_width(void);

#endif
