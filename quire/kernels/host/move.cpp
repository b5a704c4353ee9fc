/* A step of an optimiser over small groups of parameters, which is taken only if it is finite;
 * quire/train/optimisers.py has the same by PyTorch's kernels, of which each call takes as long as this.
 *
 * What is not finite spoils the sum of squares of the gradient, so that sum is the check. */

#include <math.h>

#include "host.h"

enum { ADAM, SGD };
/* Numbers that are added up in float32 before they go into a sum of float64. */
#define STRETCH 4096

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
    double beta1, beta2, eps; /* SGD's momentum is beta1 */
} Move;

EXPORT int64_t quire_move_size(void) { return sizeof(Move) + sizeof(Part); }

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

INLINE void adam(const Move *m, const Part *p, double rate)
{
    float *__restrict w = p->values, *__restrict first = p->first, *__restrict second = p->second;
    const float *__restrict gradient = p->gradient;
    double step = (double)(*p->taken += 1);
    float size = (float)(rate / (1 - pow(m->beta1, step))), root = (float)sqrt(1 - pow(m->beta2, step));
    float shrunk = m->decoupled ? (float)(1 - rate * p->decay) : 1, penalty = m->decoupled ? 0 : (float)p->decay;
    float new1 = (float)(1 - m->beta1), old2 = (float)m->beta2, new2 = (float)(1 - m->beta2), eps = (float)m->eps;
    for (int64_t i = 0; i < p->count; i++) {
        float value = w[i] * shrunk, g = gradient[i] + penalty * value;
        float a = first[i] + (g - first[i]) * new1, b = second[i] * old2 + g * g * new2;
        first[i] = a;
        second[i] = b;
        w[i] = value - size * a / (__builtin_sqrtf(b) / root + eps);
    }
}

INLINE void descend(const Move *m, const Part *p, double rate)
{
    float *__restrict w = p->values, *__restrict velocity = p->first;
    const float *__restrict gradient = p->gradient;
    float size = (float)rate, momentum = (float)m->beta1;
    float shrunk = m->decoupled ? (float)(1 - rate * p->decay) : 1, penalty = m->decoupled ? 0 : (float)p->decay;
    *p->taken += 1;
    if (velocity)
        for (int64_t i = 0; i < p->count; i++) {
            float value = w[i] * shrunk, u = velocity[i] * momentum + (gradient[i] + penalty * value);
            velocity[i] = u;
            w[i] = value - size * u;
        }
    else
        for (int64_t i = 0; i < p->count; i++) {
            float value = w[i] * shrunk;
            w[i] = value - size * (gradient[i] + penalty * value);
        }
}

template <int LANES>
INLINE void move(const Move *m, double rate, double loss, double *found)
{
    double total = 0;
    for (int64_t i = 0; i < m->count && m->checked; i++)
        total += squares<LANES>(m->parts[i].gradient, m->parts[i].count);
    *found = sqrt(total) + (loss - loss); /* which is 0 for a loss that is finite */
    if (!(*found < INFINITY))
        return;
    for (int64_t i = 0; i < m->count; i++) {
        if (m->kind == ADAM)
            adam(m, m->parts + i, rate * m->parts[i].factor);
        else
            descend(m, m->parts + i, rate * m->parts[i].factor);
    }
}

VARIANTS(move, (const Move *m, double rate, double loss, double *found), (m, rate, loss, found), 16, 8, 4)

/* The norm of the gradient. Where that or the loss is not finite, what is given is not either, and nothing has
 * moved. */
EXPORT double quire_move(const Move *m, double rate, double loss)
{
    double found;
    CHOOSE(move)(m, rate, loss, &found);
    return found;
}
