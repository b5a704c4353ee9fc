/* What the files of this folder share.
 *
 * A loop is a template that is compiled for several instruction sets, the parameter being how many numbers fit
 * into their registers; the widest that the processor has is chosen when it is called. */

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

template <typename Number, int COUNT> struct Register {
    typedef Number type __attribute__((vector_size(sizeof(Number) * COUNT)));
};
template <int COUNT> using Floats = typename Register<float, COUNT>::type;
template <int COUNT> using Ints = typename Register<int32_t, COUNT>::type;
template <int COUNT> using Doubles = typename Register<double, COUNT>::type;

/* a0 b0 a1 b1 ... of the first halves of two vectors, and of their second halves. */
template <int COUNT, int... I> struct Interleaved : Interleaved<COUNT - 1, COUNT - 1, I...> {};
template <int... I> struct Interleaved<0, I...> {
    template <typename Vector> INLINE Vector low(Vector a, Vector b)
    {
        return __builtin_shufflevector(a, b, (I % 2 * (int)sizeof...(I) + I / 2)...);
    }
    template <typename Vector> INLINE Vector high(Vector a, Vector b)
    {
        return __builtin_shufflevector(a, b, (I % 2 * (int)sizeof...(I) + I / 2 + (int)sizeof...(I) / 2)...);
    }
};

/* COUNT vectors become the columns of what they were the rows of, by log2(COUNT) perfect shuffles. */
template <int COUNT, typename Vector>
INLINE void transpose(Vector *block)
{
    Vector other[COUNT];
    for (int size = COUNT; size > 1; size /= 2) {
        for (int r = 0; r < COUNT / 2; r++) {
            other[2 * r] = Interleaved<COUNT>::low(block[r], block[r + COUNT / 2]);
            other[2 * r + 1] = Interleaved<COUNT>::high(block[r], block[r + COUNT / 2]);
        }
        for (int r = 0; r < COUNT; r++)
            block[r] = other[r];
    }
}

/* Centres or components that are computed together, and so many rounded up to whole groups. */
#define GROUP 8
INLINE int64_t padded_to_groups(int64_t count) { return (count + GROUP - 1) / GROUP * GROUP; }

/* 2 for registers of 512 bits, 1 for 256, 0 for what every processor has. */
EXPORT int64_t quire_width(void);

#endif
