/* A sweep of Lloyd's algorithm over rows in a CPU's memory; quire/functional/tally.py says what is computed,
 * and why labels are those of float64.
 *
 * N rows, D features, K centres; K' is K rounded up to whole groups. Rows are turned on their side, ROWS at a
 * time, as many as a register holds, so that it holds one feature of all of them, and are multiplied with a
 * GROUP of centres, each broadcast. A score of ROWS rows takes D multiply-adds of a vector and six operations, whatever K and D are,
 * and never leaves the registers. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"

#define FAR 3e38f
#define SMALLEST 1e-30f
/* Of the unit of sums, the unit of what they leave out. */
#define FINER 0x1p-30

typedef struct {
    int64_t count, features, clusters;
    const void *rows;      /* (N, D), float32 or float64 */
    int64_t wide, stride;  /* whether they are float64; numbers from one row to the next */
    const double *weights; /* (N,), or none */
    const double *shift;   /* (D,), a point amid the rows */
    const float *origin;   /* the same for float32's rows, or 0 for those that are kept */
    float *kept;           /* (N, D), float64's rows less the shift; or none */
    const double *centres; /* (K, D) */
    double *before;        /* (K, D), those of the last sweep */
    double *drift;         /* (K,), how far they have come, with the fastest of the others */
    float *codes;          /* (K', D), -2(c - s), a group feature by feature */
    float *biases;         /* (K',), |c - s|^2 */
    int64_t *labels;       /* (N,) */
    float *limits;         /* (N,), the drift at which a row becomes doubtful; none: all are searched */
    double *moves;         /* (threads, levels, K, D), what is added to sums; none: labels alone */
    double *gains;         /* (threads, K), likewise to counts */
    double *totals;        /* (levels, K, D), whole numbers */
    double *counts;        /* (K,) */
    double *sums;          /* (K, D) */
    double scale;          /* from numbers to whole numbers; 0: numbers are added up as they are */
    double slope, offset;  /* what two scores can be wrong by together, for a row of norm 1 and of norm 0 */
    int64_t levels, threads, swept, entered;
    int64_t searched, decided; /* rows of this sweep: by float32, and of these by float64 */
} Sweep;

EXPORT int64_t quire_sweep_size(void) { return sizeof(Sweep); }

/* Take aim at the centres, and say how far rows may rely on what they knew. */
EXPORT void quire_aim(Sweep *s)
{
    int64_t features = s->features, clusters = s->clusters, fastest = -1;
    double reach = 0, most = 0, next = 0;
    for (int64_t k = 0; k < padded_to_groups(clusters); k++) {
        float *code = s->codes + k / GROUP * GROUP * features + k % GROUP;
        if (k >= clusters) {
            for (int64_t j = 0; j < features; j++)
                code[j * GROUP] = 0;
            s->biases[k] = FAR;
            continue;
        }
        const double *centre = s->centres + k * features;
        double *before = s->before + k * features, squared = 0, path = 0;
        for (int64_t j = 0; j < features; j++) {
            double near = centre[j] - s->shift[j], moved = centre[j] - before[j];
            squared += near * near;
            path += moved * moved;
            code[j * GROUP] = (float)(-2 * near);
            before[j] = centre[j];
        }
        s->biases[k] = (float)squared;
        if (!(squared <= reach))
            reach = squared;
        if (!s->swept)
            continue;
        path = sqrt(path);
        s->drift[k] += path * (1 + 1e-9);
        if (path > most) {
            next = most, most = path, fastest = k;
        } else if (path > next)
            next = path;
    }
    for (int64_t k = 0; k < clusters && s->swept; k++)
        s->drift[k] += (k == fastest ? next : most) * (1 + 1e-9);
    s->swept = 1, s->searched = s->decided = 0;
    reach = sqrt(reach);
    s->slope = 2.02 * 0x1p-24 * (double)(features + 8) * 2 * reach;
    s->offset = 2.02 * 0x1p-24 * 8 * reach * reach;
}

/* argmin |x - c|^2 in float64, without any cancellation, the lowest on a tie. */
INLINE int64_t by_differences(const Sweep *s, int64_t row)
{
    int64_t features = s->features, label = 0;
    const float *narrow = (const float *)s->rows + row * s->stride;
    const double *wide = (const double *)s->rows + row * s->stride;
    double best = INFINITY;
    for (int64_t k = 0; k < s->clusters; k++) {
        const double *centre = s->centres + k * features;
        double part[8] = {0}, total = 0;
        for (int64_t start = 0; start < features && total <= best; start += 64) {
            int64_t stop = start + 64 < features ? start + 64 : features, j = start;
            for (; j + 8 <= stop; j += 8)
                for (int i = 0; i < 8; i++) {
                    double apart = (s->wide ? wide[j + i] : narrow[j + i]) - centre[j + i];
                    part[i] += apart * apart;
                }
            for (; j < stop; j++) {
                double apart = (s->wide ? wide[j] : narrow[j]) - centre[j];
                part[0] += apart * apart;
            }
            total = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
        }
        if (total < best)
            best = total, label = k;
    }
    return label;
}

/* The nearest whole number, of numbers up to 2^51. */
INLINE double whole(double x) { return (x + 0x1.8p52) - 0x1.8p52; }

/* A row joins the sums of a cluster (sign 1), or leaves them (-1); `rest` is for what whole numbers leave out. */
template <typename Number>
INLINE void add(const Number *__restrict row, const double *__restrict shift, int64_t features, double scale,
                double sign, double *__restrict sums, double *__restrict rest)
{
    if (rest)
        for (int64_t j = 0; j < features; j++) {
            double value = row[j] * scale - shift[j] * scale, most = whole(value);
            sums[j] += sign * most;
            rest[j] += sign * whole((value - most) * (1 / FINER));
        }
    else
        for (int64_t j = 0; j < features; j++)
            sums[j] += sign * whole(row[j] * scale - shift[j] * scale);
}

/* A row leaves the sums of one cluster, if it was in any, and joins another's. */
INLINE void move(const Sweep *s, double *moves, double *gains, int64_t row, int64_t from, int64_t to)
{
    int64_t features = s->features, level = s->clusters * features;
    const float *narrow = (const float *)s->rows + row * s->stride;
    const double *wide = (const double *)s->rows + row * s->stride;
    double weight = s->weights ? s->weights[row] : 1;
    gains[to] += weight;
    if (from >= 0)
        gains[from] -= weight;
    if (s->scale == 0) {
        double *sums = moves + to * features;
        for (int64_t j = 0; j < features; j++)
            sums[j] += weight * (s->wide ? wide[j] : narrow[j]);
        return;
    }
    for (int joins = 0; joins < 2; joins++) {
        double *sums = moves + (joins ? to : from) * features;
        if (!joins && from < 0)
            continue;
        if (s->wide)
            add(wide, s->shift, features, s->scale, joins ? 1 : -1, sums, sums + level);
        else
            add(narrow, s->shift, features, s->scale, joins ? 1 : -1, sums, NULL);
    }
}

/* Rows `picked` on their side, less the origin, (D, ROWS), and their squared norms; what is taken off float64
 * is kept too, if there is memory for it. */
template <int ROWS, typename Number>
INLINE Floats<ROWS> turn(const Sweep *s, const Number *from, int64_t stride, const Number *origin, float *kept,
                         const int64_t *picked, float *near)
{
    typedef Number vector __attribute__((vector_size(sizeof(Number) * ROWS), aligned(sizeof(Number))));
    typedef float narrow __attribute__((vector_size(4 * ROWS), aligned(4)));
    typedef Floats<ROWS> lanes;
    int64_t features = s->features, j = 0;
    const Number *rows[ROWS];
    lanes squares = {};
    for (int r = 0; r < ROWS; r++)
        rows[r] = from + picked[r] * stride;
    for (; j + ROWS <= features; j += ROWS) {
        lanes block[ROWS];
        vector shift = *(const vector *)(origin + j);
        for (int r = 0; r < ROWS; r++)
            block[r] = __builtin_convertvector(*(const vector *)(rows[r] + j) - shift, lanes);
        for (int r = 0; r < ROWS && kept; r++)
            *(narrow *)(kept + picked[r] * features + j) = block[r];
        transpose<ROWS>(block);
        for (int i = 0; i < ROWS; i++) {
            squares += block[i] * block[i];
            *(lanes *)(near + (j + i) * ROWS) = block[i];
        }
    }
    for (; j < features; j++) {
        lanes x;
        for (int r = 0; r < ROWS; r++)
            x[r] = (float)(rows[r][j] - origin[j]);
        for (int r = 0; r < ROWS && kept; r++)
            kept[picked[r] * features + j] = x[r];
        squares += x * x;
        *(lanes *)(near + j * ROWS) = x;
    }
    return squares;
}

/* The smallest score of each row, the next, and whose the smallest is. */
template <int ROWS>
INLINE void search(const Sweep *s, const float *near, Floats<ROWS> *best, Floats<ROWS> *second, Ints<ROWS> *label)
{
    typedef Floats<ROWS> lanes;
    int64_t features = s->features, padded = padded_to_groups(s->clusters);
    const float *code = s->codes;
    lanes first = lanes{} + INFINITY, next = first;
    Ints<ROWS> which = {};
    for (int64_t group = 0; group < padded; group += GROUP) {
        lanes score[GROUP];
        for (int k = 0; k < GROUP; k++)
            score[k] = lanes{} + s->biases[group + k];
        for (int64_t j = 0; j < features; j++, code += GROUP) {
            lanes x = *(const lanes *)(near + j * ROWS);
            for (int k = 0; k < GROUP; k++)
                score[k] += x * code[k];
        }
        for (int k = 0; k < GROUP; k++) {
            lanes other = first > score[k] ? first : score[k];
            next = other < next ? other : next;
            which = score[k] < first ? Ints<ROWS>{} + (int32_t)(group + k) : which;
            first = score[k] < first ? score[k] : first;
        }
    }
    *best = first, *second = next, *label = which;
}

/* Rows `picked` (at most ROWS) get new labels, and limits if these are kept; how many float64 had to decide. */
template <int ROWS>
INLINE int64_t settle(const Sweep *s, const int64_t *picked, int64_t count, int64_t thread, float *near)
{
    typedef Floats<ROWS> lanes;
    lanes best, second;
    Ints<ROWS> label;
    float slope = (float)s->slope, offset = (float)s->offset;
    float rounding = 1 + 0x1p-22f * (float)(s->features + 8);
    double *moves = s->moves ? s->moves + thread * s->levels * s->clusters * s->features : NULL;
    double *gains = s->gains + thread * s->clusters;
    lanes squares;
    if (!s->wide)
        squares = turn<ROWS>(s, (const float *)s->rows, s->stride, s->origin, NULL, picked, near);
    else if (s->kept && s->entered)
        squares = turn<ROWS>(s, s->kept, s->features, s->origin, NULL, picked, near);
    else
        squares = turn<ROWS>(s, (const double *)s->rows, s->stride, s->shift, s->kept, picked, near);
    search<ROWS>(s, near, &best, &second, &label);
    int64_t doubts = 0, from[ROWS], to[ROWS];
    float room[ROWS], lead[ROWS], doubt[ROWS], limits[ROWS], square[ROWS], reach[ROWS];
    lanes larger = squares * rounding, ahead = second - best, both = best + second;
    memcpy(square, &larger, sizeof square);
    memcpy(lead, &ahead, sizeof lead);
    memcpy(reach, &both, sizeof reach);
    for (int r = 0; r < ROWS; r++)
        doubt[r] = slope * __builtin_sqrtf(square[r]) + offset;
    for (int r = 0; r < ROWS; r++)
        room[r] = (lead[r] - 2 * doubt[r]) / __builtin_sqrtf(4 * square[r] + 2 * (reach[r] + doubt[r]));
    for (int r = 0; r < ROWS; r++) {
        bool sure = lead[r] > doubt[r] && doubt[r] > SMALLEST;
        float limit = (float)(s->drift[label[r]] + room[r] * (1 - 1e-5f));
        limits[r] = sure ? limit - __builtin_fabsf(limit) * 0x1p-22f : -INFINITY;
        doubts += !sure && r < count;
        to[r] = label[r];
        from[r] = s->entered ? s->labels[picked[r]] : -1;
    }
    for (int r = 0; r < count && doubts; r++)
        if (limits[r] == -INFINITY)
            to[r] = by_differences(s, picked[r]);
    int64_t changed = 0;
    for (int r = 0; r < ROWS; r++)
        changed += to[r] != from[r];
    for (int r = 0; r < count && s->limits; r++)
        s->limits[picked[r]] = limits[r];
    for (int r = 0; r < count && changed; r++)
        if (to[r] != from[r]) {
            s->labels[picked[r]] = to[r];
            if (moves)
                move(s, moves, gains, picked[r], from[r], to[r]);
        }
    return doubts;
}

template <int ROWS>
INLINE void sweep(Sweep *s, int64_t thread, float *near)
{
    int64_t share = (s->count + s->threads - 1) / s->threads, found = 0, searched = 0, decided = 0;
    int64_t start = thread * share, stop = start + share < s->count ? start + share : s->count;
    int64_t picked[2 * ROWS] = {0};
    bool all = !s->limits || !s->entered;
    for (int64_t row = start; row < stop; row += ROWS) {
        int64_t here = stop - row < ROWS ? stop - row : ROWS;
        int32_t doubtful[ROWS], some = all;
        if (!all && here == ROWS)
            for (int r = 0; r < ROWS; r++) {
                doubtful[r] = !(s->limits[row + r] > s->drift[s->labels[row + r]]);
                some |= doubtful[r];
            }
        else
            for (int r = 0; r < here; r++)
                some = doubtful[r] = 1;
        if (!some)
            continue;
        for (int r = 0; r < here; r++) {
            picked[found] = row + r;
            found += doubtful[r];
        }
        if (found >= ROWS) {
            decided += settle<ROWS>(s, picked, ROWS, thread, near);
            found -= ROWS, searched += ROWS;
            for (int r = 0; r < ROWS; r++)
                picked[r] = picked[r + ROWS];
        }
    }
    for (int64_t r = found; r < ROWS; r++)
        picked[r] = picked[0];
    if (found)
        decided += settle<ROWS>(s, picked, found, thread, near);
    __atomic_fetch_add(&s->searched, searched + found, __ATOMIC_RELAXED);
    __atomic_fetch_add(&s->decided, decided, __ATOMIC_RELAXED);
}

VARIANTS(sweep, (Sweep *s, int64_t thread, float *near), (s, thread, near), 16, 8, 4)

/* A thread's share of the rows; 1 where there is no memory to search them, otherwise 0. */
EXPORT int64_t quire_sweep(Sweep *s, int64_t thread)
{
    float *near = (float *)aligned_alloc(64, sizeof(float) * 16 * (size_t)s->features);
    if (!near)
        return 1;
    CHOOSE(sweep)(s, thread, near);
    free(near);
    return 0;
}

/* After all threads: what they have moved is added to the totals, and to counts. */
EXPORT void quire_total(Sweep *s)
{
    int64_t features = s->features, clusters = s->clusters, level = clusters * features;
    for (int64_t thread = 0; thread < s->threads; thread++) {
        double *moves = s->moves + thread * s->levels * level, *gains = s->gains + thread * clusters;
        for (int64_t i = 0; i < s->levels * level; i++)
            s->totals[i] += moves[i], moves[i] = 0;
        for (int64_t k = 0; k < clusters; k++)
            s->counts[k] += gains[k], gains[k] = 0;
    }
    s->entered = s->scale != 0;
    if (s->scale == 0) {
        memcpy(s->sums, s->totals, sizeof(double) * (size_t)level);
        return;
    }
    for (int64_t k = 0; k < clusters; k++)
        for (int64_t j = 0; j < features; j++) {
            int64_t i = k * features + j;
            double sum = s->totals[i] / s->scale;
            if (s->levels > 1)
                sum += s->totals[level + i] * (FINER / s->scale);
            s->sums[i] = sum + s->counts[k] * s->shift[j];
        }
}
