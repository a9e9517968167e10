/* What choosing needs to know of a row of logits: its largest entry and the next, and the sum of e^(x - largest). A row
 * is cut into blocks of 128 entries; what is known of each is put together in a stated order (docs/numerics.md). */

#ifndef DETGEN_SCORE
#define DETGEN_SCORE

#include "lanes.h"
#include "layout.h"

/* Of a block or a row. Where an entry is no number, or infinite, neither `top` nor `total` is a finite number. */
typedef struct {
    float top, next, total; /* total: of e^(x - top) */
    int32_t at;             /* the first entry that equals `top` */
} Peak;

/* Of a block; what lies behind a row's last entry is -INFINITY. */
static inline Peak peak_of_block(const float *x) {
    vec top = load(x), next = all(-INFINITY), total = all(0.0f);
    for (int i = LANES; i < LOGIT_BLOCK; i += LANES) {
        vec v = load(x + i), less = where_more(v, top, top, v);
        top = where_more(v, top, v, top);
        next = where_more(less, next, less, next);
    }
    float tops[LANES], nexts[LANES];
    store(tops, top), store(nexts, next);
    Peak peak = {-INFINITY, -INFINITY, 0, 0};
    for (int l = 0; l < LANES; l++) {
        float less = tops[l] > peak.top ? peak.top : tops[l];
        peak.top = tops[l] > peak.top ? tops[l] : peak.top;
        peak.next = less > peak.next ? less : peak.next;
        peak.next = nexts[l] > peak.next ? nexts[l] : peak.next;
    }
    const vec shift = all(peak.top > -INFINITY ? peak.top : 0.0f);
    for (int i = 0; i < LOGIT_BLOCK; i += LANES) total = add(total, exponential(sub(load(x + i), shift)));
    peak.total = fold(total);
    for (int i = 0; i < LOGIT_BLOCK; i += LANES) {
        int found = first_equal(load(x + i), all(peak.top));
        if (found < LANES) {
            peak.at = i + found;
            break;
        }
    }
    return peak;
}

/* The sum of blocks' totals, each times e^(its largest - the row's): in sixteen lanes by their number, folded. Called
 * with sixteen blocks after the other; those behind the last have -INFINITY and 0. */
INLINE vec with_blocks(vec total, vec tops, vec totals, float top) {
    return add(total, mul(totals, exponential(sub(tops, all(top)))));
}

/* Of a row, from its blocks' tops, nexts, totals and places. */
static inline Peak peak_of_row(const float *tops, const float *nexts, const float *totals, const float *places, int64_t blocks) {
    Peak peak = {-INFINITY, -INFINITY, 0, 0};
    int64_t best = 0;
    vec total = all(0.0f);
    for (int64_t b = 0; b < blocks; b++) {
        float less = tops[b] > peak.top ? peak.top : tops[b];
        if (tops[b] > peak.top) peak.top = tops[b], best = b;
        less = nexts[b] > less ? nexts[b] : less;
        peak.next = less > peak.next ? less : peak.next;
    }
    memcpy(&peak.at, places + best, sizeof peak.at);
    peak.at += (int32_t)(best * LOGIT_BLOCK);
    for (int64_t b = 0; b < blocks; b += LANES) {
        float some[LANES];
        for (int l = 0; l < LANES; l++) some[l] = -INFINITY;
        memcpy(some, tops + b, sizeof(float) * (blocks - b < LANES ? blocks - b : LANES));
        total = with_blocks(total, load(some), load_some(totals + b, blocks - b), peak.top);
    }
    peak.total = fold(total);
    return peak;
}

/* The logarithm of a positive finite number: that of program/fdlibm.py. */
static inline double logarithm(double x) {
    static const double terms[] = {1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01,
                                   2.222219843214978396e-01, 2.857142874366239149e-01, 3.999999999940941908e-01,
                                   6.666666666666735130e-01};
    int exponent;
    double mantissa = frexp(x, &exponent), f, s, square, half, p = terms[0];
    if (mantissa < 0.70710678118654752440) mantissa *= 2, exponent--;
    f = mantissa - 1;
    s = f / (2 + f);
    square = s * s;
    half = 0.5 * f * f;
    for (int t = 1; t < 7; t++) p = p * square + terms[t];
    return exponent * 6.93147180369123816490e-01 -
           ((half - (s * (half + square * p) + exponent * 1.90821492927058770002e-10)) - f);
}

/* The logarithm of a row's total; NaN where a logit is none. */
static inline float log_of(float total) { return total > 0 && total < INFINITY ? (float)logarithm(total) : total - total; }

#endif
