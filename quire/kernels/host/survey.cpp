/* Sums over rows in a CPU's memory that K-means has to know before it begins; `_power_sums` of
 * quire/tasks/kmeans_rows.py is the same by PyTorch's operations. */

#include "host.h"

/* Of rows (N, D) less the shift: sums of x, of x^2, of w|x|^2 and of w, and the largest |x|^2, (2D + 3,), which
 * are added to. Several numbers are added up side by side, since each sum waits for the one before. */
template <int SIDE, typename Number>
INLINE void survey_rows(const Number *rows, int64_t count, int64_t features, int64_t stride,
                        const double *weights, const double *shift, double *found)
{
    double *first = found, *second = found + features, *rest = found + 2 * features;
    for (int64_t row = 0; row < count; row++, rows += stride) {
        double weight = weights ? weights[row] : 1, part[SIDE] = {0}, squared = 0;
        int64_t j = 0;
        for (; j + SIDE <= features; j += SIDE)
            for (int i = 0; i < SIDE; i++) {
                double x = (double)rows[j + i] - shift[j + i];
                first[j + i] += x;
                second[j + i] += x * x;
                part[i] += x * x;
            }
        for (; j < features; j++) {
            double x = (double)rows[j] - shift[j];
            first[j] += x;
            second[j] += x * x;
            squared += x * x;
        }
        for (int i = 0; i < SIDE; i++)
            squared += part[i];
        rest[0] += weight * squared;
        rest[1] += weight;
        if (!(squared <= rest[2])) /* also where it is not a number */
            rest[2] = squared;
    }
}

template <int SIDE>
INLINE void survey(const void *rows, int64_t wide, int64_t count, int64_t features, int64_t stride,
                   const double *weights, const double *shift, double *found)
{
    if (wide)
        survey_rows<SIDE>((const double *)rows, count, features, stride, weights, shift, found);
    else
        survey_rows<SIDE>((const float *)rows, count, features, stride, weights, shift, found);
}

VARIANTS(survey,
         (const void *rows, int64_t wide, int64_t count, int64_t features, int64_t stride,
          const double *weights, const double *shift, double *found),
         (rows, wide, count, features, stride, weights, shift, found), 16, 8, 4)

EXPORT void quire_survey(const void *rows, int64_t wide, int64_t count, int64_t features, int64_t stride,
                         const double *weights, const double *shift, double *found)
{
    CHOOSE(survey)(rows, wide, count, features, stride, weights, shift, found);
}
