/* Mixtures of experts (Shazeer et al., arXiv 1701.06538): which experts a row takes, and what becomes of their results.
 *
 * A row's probabilities are e^(x - largest), divided by their sum, which is made in sixteen lanes and folded. It takes
 * the most probable experts, the first ones of ties. Their results are added up in order of their numbers. */

#ifndef DETGEN_EXPERTS
#define DETGEN_EXPERTS

#include "rowwise.h"

/* The rows that take each expert, for one layer at a time. */
typedef struct {
    int32_t hit;      /* experts that any row takes */
    int32_t *experts; /* [hit] their numbers */
    int32_t *firsts;  /* [hit + 1] where in `items` those of an expert begin */
    int32_t *items;   /* [rows * picks] row * picks + segment */
} Lists;

static void route(const Route *s, float *x, float *routes) {
    const int64_t n = s->x.width, picks = s->to.width / 2;
    float sum = 0;
    softmax(x, n, x);
    int64_t taken[MOST_PICKS];
    for (int64_t p = 0; p < picks; p++) {
        int64_t best = -1;
        for (int64_t i = 0; i < n; i++) {
            int64_t there = 0;
            for (int64_t q = 0; q < p; q++) there |= taken[q] == i;
            if (!there && (best < 0 || x[i] > x[best])) best = i;
        }
        taken[p] = best;
    }
    for (int64_t p = 1; p < picks; p++) /* in order of their numbers */
        for (int64_t q = p; q && taken[q] < taken[q - 1]; q--) {
            int64_t other = taken[q];
            taken[q] = taken[q - 1];
            taken[q - 1] = other;
        }
    for (int64_t p = 0; p < picks; p++) sum += x[taken[p]];
    for (int64_t p = 0; p < picks; p++) {
        routes[2 * p] = (float)taken[p];
        routes[2 * p + 1] = s->normalized ? x[taken[p]] / sum : x[taken[p]];
    }
}

static void sort_rows(const Sort *s, const float *routes, int64_t row_floats, int64_t rows, Lists *lists) {
    const int64_t picks = s->routes.width / 2;
    int32_t at = 0;
    lists->hit = 0;
    for (int64_t e = 0; e < s->experts; e++) {
        const int32_t first = at;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t p = 0; p < picks; p++)
                if ((int64_t)routes[r * row_floats + 2 * p] == e) lists->items[at++] = (int32_t)(r * picks + p);
        if (at == first) continue;
        lists->experts[lists->hit] = (int32_t)e;
        lists->firsts[lists->hit++] = first;
    }
    lists->firsts[lists->hit] = at;
}

/* The results of a row's experts, each as wide as the sum, times their weights. */
static void combine(const Combine *s, const float *x, const float *routes, float *to) {
    const int64_t n = s->to.buffer.width, picks = s->routes.width / 2;
    for (int64_t i = 0; i < n; i += LANES) {
        vec sum = all(0.0f);
        for (int64_t p = 0; p < picks; p++)
            sum = fma3(load_some(x + p * n + i, n - i), all(routes[2 * p + 1]), sum);
        put(&s->to, to + i, sum, n - i);
    }
}

#endif
