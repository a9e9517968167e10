/* Rows of logits, as choosing.c and judging.c take them. */

#ifndef DETGEN_LOGITS
#define DETGEN_LOGITS

#include <math.h>

#include "layout.h"

#define SIDE 64 /* entries of a row that are looked at together */

static inline const float *row_of(const Rows *of, int64_t i) {
    return of->logits + (of->rows ? of->rows[i] : i) * of->stride;
}

/* The largest entry; NaN if one is no number. */
static inline float largest(const float *x, int64_t n) {
    float top[SIDE];
    int32_t none[SIDE];
    for (int l = 0; l < SIDE; l++) top[l] = -INFINITY, none[l] = 0;
    int64_t j = 0;
    for (; j + SIDE <= n; j += SIDE)
        for (int l = 0; l < SIDE; l++) {
            none[l] |= x[j + l] != x[j + l];
            top[l] = x[j + l] > top[l] ? x[j + l] : top[l];
        }
    for (int l = 0; j < n; j++, l++) {
        none[l] |= x[j] != x[j];
        top[l] = x[j] > top[l] ? x[j] : top[l];
    }
    for (int half = SIDE / 2; half; half /= 2)
        for (int l = 0; l < half; l++) {
            none[l] |= none[l + half];
            top[l] = top[l + half] > top[l] ? top[l + half] : top[l];
        }
    return none[0] ? NAN : top[0];
}

#endif
