/* A sweep of expectation-maximisation over rows in a CPU's memory; `sweep_chunks` of
 * quire/functional/mixture_chunks.py is the same by PyTorch's operations, and says what is computed.
 *
 * N rows, D features, M components of all starts, M' rounded up to whole groups, P products phi of a row.
 *
 * Rows are turned on their side, BLOCK at a time. Two matrix products are nearly all of the work: ln p = Theta
 * phi, where a register holds rows, and the sums of r phi, where it holds components. Each keeps a part of its
 * result in registers from the first term to the last, and reads phi where it was written, in a core's cache. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"

#define BLOCK 16
/* Bytes of phi that rows taken together may have, and how many rows these are at most. */
#define CACHE (320 << 10)
#define MOST_BLOCKS 4

enum { FULL, DIAG, SPHERICAL, TIED };

typedef struct {
    int64_t count, features, wide, stride;
    const void *rows;    /* (N, D), float32 or float64 */
    const double *shift; /* (D,) */
    const double *scale; /* (D, D) if `mixes`, otherwise (D,) */
    int64_t mixes, kind, starts, components, terms;
    const double *theta; /* (P, M') */
    double *likelihood;  /* (R,) */
    double *sums;        /* (P, M') */
    double *total;       /* (D, D), for tied covariances */
} Mixture;

EXPORT int64_t quire_mixture_size(void) { return sizeof(Mixture); }

/* e^x for x from -600 to 0, to the last place but one: 2^n times a polynomial of what is left, |r| < ln 2 / 2. */
template <int LANES>
INLINE Doubles<LANES> exponential(Doubles<LANES> x)
{
    typedef typename Register<int64_t, LANES>::type whole;
    const double magic = 0x1.8p52;
    Doubles<LANES> shifted = x * 0x1.71547652b82fep0 + magic, n = shifted - magic;
    Doubles<LANES> r = (x - n * 0x1.62e42fefa3800p-1) - n * 0x1.ef35793c76730p-45;
    Doubles<LANES> sum = Doubles<LANES>{} + 1.0 / 6227020800;
    const double inverse[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                              1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1, 1};
    for (double factor : inverse)
        sum = sum * r + factor;
    Doubles<LANES> found = (Doubles<LANES>)((whole)sum + ((whole)shifted << 52));
    return x == x ? found : x;
}

/* BLOCK rows in the frame, on their side and with a row of ones, (D + 1, BLOCK); zeros for rows that are not. */
template <int LANES>
INLINE void enter(const Mixture *m, int64_t row, int64_t count, double *apart, double *columns)
{
    int64_t features = m->features;
    for (int r = 0; r < BLOCK; r++) {
        const float *narrow = (const float *)m->rows + (row + r) * m->stride;
        const double *wide = (const double *)m->rows + (row + r) * m->stride;
        for (int64_t i = 0; i < features; i++)
            apart[i * BLOCK + r] = r < count ? (m->wide ? wide[i] : narrow[i]) - m->shift[i] : 0;
        columns[features * BLOCK + r] = r < count;
    }
    for (int64_t j = 0; j < features; j++) {
        Doubles<LANES> sum[BLOCK / LANES] = {};
        for (int64_t i = m->mixes ? 0 : j; i < (m->mixes ? features : j + 1); i++) {
            double factor = m->mixes ? m->scale[i * features + j] : m->scale[j];
            if (factor != 0) /* half of a frame is zeros */
                for (int v = 0; v < BLOCK / LANES; v++)
                    sum[v] += factor * *(Doubles<LANES> *)(apart + i * BLOCK + v * LANES);
        }
        for (int v = 0; v < BLOCK / LANES; v++)
            *(Doubles<LANES> *)(columns + j * BLOCK + v * LANES) = sum[v];
    }
}

/* phi (P, BLOCK). */
template <int LANES>
INLINE void products(const Mixture *m, const double *columns, double *phi)
{
    typedef Doubles<LANES> lanes;
    int64_t features = m->features;
    if (m->kind == FULL) {
        for (int64_t i = 0; i <= features; i++)
            for (int64_t j = i; j <= features; j++, phi += BLOCK)
                for (int v = 0; v < BLOCK; v += LANES)
                    *(lanes *)(phi + v) = *(const lanes *)(columns + i * BLOCK + v) *
                                          *(const lanes *)(columns + j * BLOCK + v);
        return;
    }
    if (m->kind == SPHERICAL)
        memset(phi, 0, sizeof(double) * BLOCK);
    for (int64_t i = 0; i < features * BLOCK && m->kind != TIED; i += LANES) {
        lanes x = *(const lanes *)(columns + i);
        if (m->kind == DIAG)
            *(lanes *)(phi + i) = x * x;
        else
            *(lanes *)(phi + i % BLOCK) += x * x;
    }
    phi += m->kind == DIAG ? features * BLOCK : m->kind == SPHERICAL ? BLOCK : 0;
    memcpy(phi, columns, sizeof(double) * (size_t)(features + 1) * BLOCK);
}

/* Theta phi of BLOCK rows, (M', BLOCK): two registers of rows with some components at a time. */
template <int LANES>
INLINE void densities(const Mixture *m, const double *phi, double *logs)
{
    typedef Doubles<LANES> lanes;
    constexpr int SOME = LANES == 8 ? 8 : 4;
    int64_t padded = padded_to_groups(m->starts * m->components);
    for (int64_t first = 0; first < padded; first += SOME)
        for (int v = 0; v < BLOCK; v += 2 * LANES) {
            lanes one[SOME] = {}, two[SOME] = {};
            const double *theta = m->theta + first, *product = phi + v;
            for (int64_t p = 0; p < m->terms; p++, theta += padded, product += BLOCK) {
                lanes a = *(const lanes *)product, b = *(const lanes *)(product + LANES);
                for (int k = 0; k < SOME; k++) {
                    one[k] += theta[k] * a;
                    two[k] += theta[k] * b;
                }
            }
            for (int k = 0; k < SOME; k++) {
                *(lanes *)(logs + (first + k) * BLOCK + v) = one[k];
                *(lanes *)(logs + (first + k) * BLOCK + v + LANES) = two[k];
            }
        }
}

/* Responsibilities of BLOCK rows, (BLOCK, M'), zeros for rows that are not; ln p is added to the likelihood. */
template <int LANES>
INLINE void shares_of(const Mixture *m, double *logs, int64_t count, double *shares)
{
    typedef Doubles<LANES> lanes;
    int64_t components = m->components, padded = padded_to_groups(m->starts * components);
    for (int64_t start = 0; start < m->starts; start++)
        for (int v = 0; v < BLOCK; v += LANES) {
            double *own = logs + start * components * BLOCK + v;
            lanes largest = *(lanes *)own, sum = {};
            for (int64_t k = 1; k < components; k++) {
                lanes value = *(lanes *)(own + k * BLOCK);
                largest = value > largest ? value : largest;
            }
            for (int64_t k = 0; k < components; k++) {
                lanes value = *(lanes *)(own + k * BLOCK) - largest, least = lanes{} - 600.0;
                value = exponential<LANES>(value < least ? least : value);
                *(lanes *)(own + k * BLOCK) = value;
                sum += value;
            }
            for (int r = 0; r < LANES && v + r < count; r++)
                m->likelihood[start] += log(sum[r]) + largest[r];
            sum = 1.0 / sum;
            for (int64_t k = 0; k < components; k++)
                for (int r = 0; r < LANES; r++)
                    shares[(v + r) * padded + start * components + k] =
                        v + r < count ? own[k * BLOCK + r] * sum[r] : 0;
        }
}

/* Sums of r phi over blocks of rows, (P, M'): some terms with REGISTERS of components at a time. */
template <int LANES, int REGISTERS>
INLINE void gather(const Mixture *m, const double *phi, const double *shares, int64_t blocks, int64_t first)
{
    typedef Doubles<LANES> lanes;
    constexpr int SOME = 6 * 2 / REGISTERS;
    int64_t terms = m->terms, padded = padded_to_groups(m->starts * m->components);
    for (int64_t p = 0; p < terms; p += SOME) {
        int64_t back = p + SOME > terms ? p + SOME - terms : 0; /* what has been added before is not added again */
        int64_t from = p - back < 0 ? 0 : p - back;
        lanes sum[SOME][REGISTERS] = {};
        const double *share = shares + first;
        for (int64_t block = 0; block < blocks; block++) {
            const double *product = phi + (block * terms + from) * BLOCK;
            for (int r = 0; r < BLOCK; r++, share += padded)
                for (int i = 0; i < SOME; i++)
                    for (int v = 0; v < REGISTERS; v++)
                        sum[i][v] += product[i * BLOCK + r] * *(const lanes *)(share + v * LANES);
        }
        for (int i = 0; i < SOME; i++)
            if (from + i >= p && from + i < terms)
                for (int v = 0; v < REGISTERS; v++)
                    *(lanes *)(m->sums + (from + i) * padded + first + v * LANES) += sum[i][v];
    }
}

template <int LANES>
INLINE void mixture(const Mixture *m, double *memory, int64_t blocks)
{
    typedef Doubles<LANES> lanes;
    int64_t features = m->features, padded = padded_to_groups(m->starts * m->components);
    double *apart = memory, *columns = apart + features * BLOCK, *logs = columns + (features + 1) * BLOCK;
    double *shares = logs + padded * BLOCK, *phi = shares + blocks * BLOCK * padded;
    memset(shares, 0, sizeof(double) * (size_t)(blocks * BLOCK * padded));
    for (int64_t row = 0; row < m->count; row += blocks * BLOCK) {
        int64_t here = 0;
        for (; here < blocks && row + here * BLOCK < m->count; here++) {
            int64_t start = row + here * BLOCK, count = m->count - start < BLOCK ? m->count - start : BLOCK;
            double *own = phi + here * m->terms * BLOCK;
            enter<LANES>(m, start, count, apart, columns);
            products<LANES>(m, columns, own);
            densities<LANES>(m, own, logs);
            shares_of<LANES>(m, logs, count, shares + here * BLOCK * padded);
            for (int64_t i = 0; i < features && m->kind == TIED; i++)
                for (int64_t j = 0; j < features; j++) {
                    lanes sum = {};
                    for (int v = 0; v < BLOCK; v += LANES)
                        sum += *(lanes *)(columns + i * BLOCK + v) * *(lanes *)(columns + j * BLOCK + v);
                    for (int r = 0; r < LANES; r++)
                        m->total[i * features + j] += sum[r];
                }
        }
        int64_t first = 0;
        for (; first + 2 * LANES <= padded; first += 2 * LANES)
            gather<LANES, 2>(m, phi, shares, here, first);
        for (; first < padded; first += LANES)
            gather<LANES, 1>(m, phi, shares, here, first);
    }
}

VARIANTS(mixture, (const Mixture *m, double *memory, int64_t blocks), (m, memory, blocks), 8, 4, 2)

/* 1 where there is no memory to compute in, otherwise 0. */
EXPORT int64_t quire_mixture(const Mixture *m)
{
    int64_t padded = padded_to_groups(m->starts * m->components), most = CACHE / (8 * BLOCK * m->terms);
    int64_t blocks = most < 1 ? 1 : most < MOST_BLOCKS ? most : MOST_BLOCKS;
    int64_t numbers = BLOCK * (2 * m->features + 1 + padded + blocks * (padded + m->terms + 2 * GROUP));
    double *memory = (double *)aligned_alloc(64, sizeof(double) * (size_t)numbers);
    if (!memory)
        return 1;
    CHOOSE(mixture)(m, memory, blocks);
    free(memory);
    return 0;
}
