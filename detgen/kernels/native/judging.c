/* The best entry of each row, and log-probabilities; docs/numerics.md states the order of their sums. */

#include <stdatomic.h>

#include "lanes.h"
#include "logits.h"
#include "pool.h"

typedef struct {
    Rows of;
    int64_t *tokens;
    double *leads;
} Best;

typedef struct {
    Rows of;
    const int64_t *tokens; /* by row, not by place in `rows` */
    float *chosen;         /* log-probabilities of the tokens; null if they are not wanted */
    float *every;          /* [count, vocabulary] log-probabilities; null if they are not wanted */
} Judged;

/* For the caller to see that it means the same structures. */
int best_bytes(void) { return sizeof(Best); }
int judged_bytes(void) { return sizeof(Judged); }

/* The two largest entries, and whether one is no number. */
static int two_largest(const float *x, int64_t n, float *largest, float *next) {
    float top[SIDE], second[SIDE];
    int32_t none[SIDE];
    for (int l = 0; l < SIDE; l++) top[l] = second[l] = -INFINITY, none[l] = 0;
    int64_t j = 0;
    for (; j + SIDE <= n; j += SIDE)
        for (int l = 0; l < SIDE; l++) {
            float v = x[j + l], less = v < top[l] ? v : top[l];
            none[l] |= v != v;
            top[l] = v > top[l] ? v : top[l];
            second[l] = less > second[l] ? less : second[l];
        }
    for (int l = 0; j < n; j++, l++) {
        float v = x[j], less = v < top[l] ? v : top[l];
        none[l] |= v != v;
        top[l] = v > top[l] ? v : top[l];
        second[l] = less > second[l] ? less : second[l];
    }
    for (int half = SIDE / 2; half; half /= 2)
        for (int l = 0; l < half; l++) {
            float v = top[l + half], less = v < top[l] ? v : top[l];
            none[l] |= none[l + half];
            top[l] = v > top[l] ? v : top[l];
            second[l] = second[l + half] > second[l] ? second[l + half] : second[l];
            second[l] = less > second[l] ? less : second[l];
        }
    *largest = top[0];
    *next = second[0];
    return none[0];
}

/* The first entry that is `value`, or that is no number if `value` is none; one of them is there. */
static int64_t first_of(const float *x, int64_t n, float value) {
    int64_t j = 0;
    if (value != value) {
        while (x[j] == x[j]) j++;
        return j;
    }
    for (; j + SIDE <= n; j += SIDE) {
        int32_t any = 0;
        for (int l = 0; l < SIDE; l++) any |= -(x[j + l] == value);
        if (any) break;
    }
    while (x[j] != value) j++;
    return j;
}

typedef struct {
    const void *of;
    atomic_int next; /* row */
} Progress;

static void best_rows(void *of, int thread) {
    Progress *progress = of;
    const Best *b = progress->of;
    (void)thread;
    for (int64_t i; (i = atomic_fetch_add(&progress->next, 1)) < b->of.count;) {
        const float *x = row_of(&b->of, i);
        float top, second;
        if (two_largest(x, b->of.vocabulary, &top, &second)) top = NAN;
        b->tokens[i] = first_of(x, b->of.vocabulary, top);
        b->leads[i] = (double)top - (double)second + 0.0;
    }
}

/* Of each row the largest entry, the first of ties, and its lead over the largest of the others. */
void best(const Best *b) {
    Progress progress = {b, 0};
    together(best_rows, &progress, (int)b->of.threads);
}

/* The logarithm of a positive finite number: that of kernels/exact.py. */
static double logarithm(double x) {
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

/* The logarithm of the sum of e^(x - top), made in sixteen lanes that are folded. */
static float log_sum(const float *x, int64_t n, float top) {
    vec peak = all(top), total = all(0.0f);
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES) total = add(total, exponential(sub(load(x + j), peak)));
    if (j < n) {
        float rest[LANES];
        store(rest, exponential(sub(load_some(x + j, n - j), peak)));
        total = add(total, load_some(rest, n - j));
    }
    float sum = fold(total);
    return sum > 0 && sum < INFINITY ? (float)logarithm(sum) : sum - sum; /* NaN, where a logit is none */
}

static void judge_rows(void *of, int thread) {
    Progress *progress = of;
    const Judged *d = progress->of;
    const int64_t n = d->of.vocabulary;
    (void)thread;
    for (int64_t i; (i = atomic_fetch_add(&progress->next, 1)) < d->of.count;) {
        const float *x = row_of(&d->of, i);
        const float top = largest(x, n), rest = log_sum(x, n, top);
        if (d->chosen) d->chosen[i] = x[d->tokens[d->of.rows ? d->of.rows[i] : i]] - top - rest;
        for (int64_t j = 0; d->every && j < n; j++) d->every[i * n + j] = x[j] - top - rest;
    }
}

/* Log-probabilities of rows. */
void judge(const Judged *d) {
    Progress progress = {d, 0};
    together(judge_rows, &progress, (int)d->of.threads);
}
