/* A step of an optimiser over groups of parameters, which is taken only if it is finite; quire/train/optimisers.py
 * has the same by PyTorch's kernels, a call for each group, after one that checks it.
 *
 * What is not finite spoils the sum of squares of the gradient, so that sum is the check. All threads add up
 * their shares of it before any of them moves something. */

#include <math.h>

#include "host.h"

enum { ADAM, SGD };
/* Numbers that are added up in float32 before they go into a sum of float64. */
#define STRETCH 4096
/* Shares of threads begin at multiples of this, so that no two write to one line of a cache. */
#define LINE 16
#define MOST_THREADS 64

/* PyTorch's own threads, where they are GNU's: what they computed lies in their caches, and threads of another
 * kind would wait for cores on which these wait for work. Elsewhere one thread does it all. They are always
 * called all together, since GNU's library ends those that a call leaves out. */
extern "C" {
void GOMP_parallel(void (*work)(void *), void *given, unsigned threads, unsigned flags) __attribute__((weak));
void GOMP_barrier(void) __attribute__((weak));
int omp_get_thread_num(void) __attribute__((weak));
int omp_get_num_threads(void) __attribute__((weak));
}

typedef struct {
    float *values, *gradient, *first, *second; /* (n,); SGD has its velocity in `first`, or none */
    float *taken;                              /* how many steps */
    int64_t count;
    double decay, factor; /* of weights, and of the step size */
} Part;

typedef struct {
    const Part *parts;
    int64_t count, kind, decoupled;
    int64_t checked; /* 0 to find out what the check takes */
    int64_t together; /* whether all threads take part */
    double beta1, beta2, eps; /* SGD's momentum is beta1 */
} Move;

EXPORT int64_t quire_move_size(void) { return sizeof(Move) + sizeof(Part); }

EXPORT int64_t quire_has_threads(void)
{
    return GOMP_parallel && GOMP_barrier && omp_get_thread_num && omp_get_num_threads;
}

template <int LANES>
INLINE double squares(const float *values, int64_t count)
{
    typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
    double total = 0;
    for (int64_t start = 0; start < count; start += STRETCH) {
        int64_t stop = start + STRETCH < count ? start + STRETCH : count, i = start;
        Floats<LANES> part[4] = {};
        float rest = 0;
        for (; i + 4 * LANES <= stop; i += 4 * LANES)
            for (int v = 0; v < 4; v++) {
                Floats<LANES> x = *(const lanes *)(values + i + v * LANES);
                part[v] += x * x;
            }
        for (; i < stop; i++)
            rest += values[i] * values[i];
        part[0] = (part[0] + part[1]) + (part[2] + part[3]);
        for (int r = 0; r < LANES; r++)
            total += (double)part[0][r];
        total += (double)rest;
    }
    return total;
}

/* The numbers from `start` to `stop` of a part. */
INLINE void adam(const Move *m, const Part *p, double rate, int64_t start, int64_t stop)
{
    float *__restrict w = p->values, *__restrict first = p->first, *__restrict second = p->second;
    const float *__restrict gradient = p->gradient;
    double step = (double)*p->taken + 1;
    float size = (float)(rate / (1 - pow(m->beta1, step))), root = (float)sqrt(1 - pow(m->beta2, step));
    float shrunk = m->decoupled ? (float)(1 - rate * p->decay) : 1, penalty = m->decoupled ? 0 : (float)p->decay;
    float new1 = (float)(1 - m->beta1), old2 = (float)m->beta2, new2 = (float)(1 - m->beta2), eps = (float)m->eps;
    for (int64_t i = start; i < stop; i++) {
        float value = w[i] * shrunk, g = gradient[i] + penalty * value;
        float a = first[i] + (g - first[i]) * new1, b = second[i] * old2 + g * g * new2;
        first[i] = a;
        second[i] = b;
        w[i] = value - size * a / (__builtin_sqrtf(b) / root + eps);
    }
}

INLINE void descend(const Move *m, const Part *p, double rate, int64_t start, int64_t stop)
{
    float *__restrict w = p->values, *__restrict velocity = p->first;
    const float *__restrict gradient = p->gradient;
    float size = (float)rate, momentum = (float)m->beta1;
    float shrunk = m->decoupled ? (float)(1 - rate * p->decay) : 1, penalty = m->decoupled ? 0 : (float)p->decay;
    if (velocity)
        for (int64_t i = start; i < stop; i++) {
            float value = w[i] * shrunk, u = velocity[i] * momentum + (gradient[i] + penalty * value);
            velocity[i] = u;
            w[i] = value - size * u;
        }
    else
        for (int64_t i = start; i < stop; i++) {
            float value = w[i] * shrunk;
            w[i] = value - size * (gradient[i] + penalty * value);
        }
}

/* A call of all threads. */
typedef struct {
    const Move *move;
    double rate, loss;
    double squares[MOST_THREADS]; /* of the share of each */
    double found;
} Call;

INLINE int64_t edge(int64_t count, int64_t thread, int64_t threads)
{
    return thread == threads ? count : count * thread / threads / LINE * LINE;
}

/* What one of the threads does. */
template <int LANES>
INLINE void move(Call *call, int64_t thread, int64_t threads)
{
    const Move *m = call->move;
    double total = 0;
    int64_t team = threads;
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    for (int64_t i = 0; i < m->count && m->checked && thread < threads; i++) {
        const Part *p = m->parts + i;
        int64_t start = edge(p->count, thread, threads), stop = edge(p->count, thread + 1, threads);
        total += squares<LANES>(p->gradient + start, stop - start);
    }
    if (team > 1) {
        if (thread < threads)
            call->squares[thread] = total;
        GOMP_barrier();
        total = 0;
        for (int64_t i = 0; i < threads; i++)
            total += call->squares[i];
    }
    double found = sqrt(total) + (call->loss - call->loss); /* which is 0 for a loss that is finite */
    if (thread == 0)
        call->found = found;
    if (!(found < INFINITY) || thread >= threads)
        return;
    for (int64_t i = 0; i < m->count; i++) {
        const Part *p = m->parts + i;
        int64_t start = edge(p->count, thread, threads), stop = edge(p->count, thread + 1, threads);
        if (m->kind == ADAM)
            adam(m, p, call->rate * p->factor, start, stop);
        else
            descend(m, p, call->rate * p->factor, start, stop);
    }
}

VARIANTS(move, (Call *call, int64_t thread, int64_t threads), (call, thread, threads), 16, 8, 4)

static void move_together(void *call)
{
    CHOOSE(move)((Call *)call, omp_get_thread_num(), omp_get_num_threads());
}

/* The norm of the gradient. Where that or the loss is not finite, what is given is not either, and nothing has
 * moved. */
EXPORT double quire_move(const Move *m, double rate, double loss)
{
    Call call;
    call.move = m;
    call.rate = rate;
    call.loss = loss;
    if (m->together && quire_has_threads())
        GOMP_parallel(move_together, &call, 0, 0);
    else
        CHOOSE(move)(&call, 0, 1);
    if (call.found < INFINITY)
        for (int64_t i = 0; i < m->count; i++)
            *m->parts[i].taken += 1;
    return call.found;
}
