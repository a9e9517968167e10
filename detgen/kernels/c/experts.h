/* Mixtures of experts (Shazeer et al., arXiv 1701.06538): which experts a row takes, and what becomes of their results.
 *
 * Experts have scores, made of a row's logits. It takes those with the largest scores, the first ones of ties; of groups
 * of experts (DeepSeek-AI, arXiv 2405.04434), those in the best ones. Their results are added up in order of their
 * numbers. */

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

/* Leaves the `picks` largest of n numbers marked; of ties the first ones. What was taken before is no number. */
static void take_largest(float *x, int64_t n, int64_t picks, int64_t *taken) {
    for (int64_t p = 0; p < picks; p++) {
        int64_t best = -1;
        for (int64_t i = 0; i < n; i++)
            if (x[i] == x[i] && (best < 0 || x[i] > x[best])) best = i;
        taken[p] = best;
        x[best] = NAN;
    }
}

/* Of groups of experts, leaves the scores of those with the largest ones; -INFINITY of all others. */
static void leave_best_groups(const Route *s, float *scores) {
    const int64_t each = s->x.width / s->groups;
    float best[MOST_EXPERTS];
    int64_t taken[MOST_EXPERTS];
    for (int64_t g = 0; g < s->groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = g * each; i < (g + 1) * each; i++)
            if (scores[i] > first) second = first, first = scores[i];
            else if (scores[i] > second) second = scores[i];
        best[g] = s->of_group == 1 ? first : first + second;
    }
    take_largest(best, s->groups, s->best_groups, taken);
    for (int64_t g = 0; g < s->groups; g++)
        if (best[g] == best[g])
            for (int64_t i = g * each; i < (g + 1) * each; i++) scores[i] = -INFINITY;
}

/* Makes scores of the logits of the experts taken, the largest one first: the share of each in the softmax of those that
 * are close to it, without those before it. */
static void mix_sparsely(const Route *s, float *x, const int64_t *taken) {
    const int64_t n = s->x.width, picks = s->to.width / 2;
    float shares[MOST_EXPERTS], scores[MOST_PICKS];
    int out[MOST_EXPERTS] = {0};
    for (int64_t p = 0; p < picks; p++) {
        const float most = x[taken[p]];
        float total = 0;
        for (int64_t i = 0; i < n; i += LANES)
            store_some(shares + i, exponential(sub(load_some(x + i, n - i), all(most))), n - i);
        for (int64_t i = 0; i < n; i++) {
            const float size = __builtin_fabsf(x[i]), of = size > most ? size : most;
            if (!out[i] && !((most - x[i]) / of > (float)s->spread)) total += shares[i];
        }
        scores[p] = 1.0f / total;
        out[taken[p]] = 1;
    }
    for (int64_t p = 0; p < picks; p++) x[taken[p]] = scores[p];
}

static void route(const Route *s, float *x, float *routes) {
    const int64_t n = s->x.width, picks = s->to.width / 2;
    float sum = 0, ranked[MOST_EXPERTS];
    int64_t taken[MOST_PICKS];
    memcpy(ranked, x, sizeof(float) * n);
    if (s->scoring == OVER_PICKS) {
        float most = -INFINITY;
        for (int64_t i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
        for (int64_t i = 0; i < n; i += LANES)
            store_some(x + i, exponential(sub(load_some(x + i, n - i), all(most))), n - i);
    } else if (s->scoring != SPARSE) {
        if (s->scoring != OVER_ALL)
            for (int64_t i = 0; i < n; i += LANES) store_some(x + i, sigmoid(load_some(x + i, n - i)), n - i);
        else softmax(x, n, x);
        if (s->scoring != SIGMOIDS_OF_PICKS) memcpy(ranked, x, sizeof(float) * n);
    }
    for (int64_t i = 0; i < n; i++) {
        if (s->correction) ranked[i] += s->correction[i];
        if (ranked[i] != ranked[i]) ranked[i] = -INFINITY;
    }
    if (s->groups > 1) leave_best_groups(s, ranked);
    take_largest(ranked, n, picks, taken);
    if (s->scoring == SPARSE) mix_sparsely(s, x, taken);
    for (int64_t p = 1; p < picks; p++) /* in order of their numbers */
        for (int64_t q = p; q && taken[q] < taken[q - 1]; q--) {
            int64_t other = taken[q];
            taken[q] = taken[q - 1];
            taken[q - 1] = other;
        }
    for (int64_t p = 0; p < picks; p++) sum += x[taken[p]];
    if (s->scoring == SIGMOIDS) sum += (float)s->added;
    for (int64_t p = 0; p < picks; p++) {
        float weight = s->normalized ? x[taken[p]] / sum : x[taken[p]];
        if (s->factor != 1.0) weight *= (float)s->factor;
        if (s->factors) weight *= s->factors[taken[p]];
        routes[2 * p] = (float)taken[p];
        routes[2 * p + 1] = weight;
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

/* A row for each of its routes, times the route's weight. */
static void weigh(const Weigh *s, const float *x, const float *routes, float *to) {
    const int64_t n = s->x.width, picks = s->routes.width / 2;
    for (int64_t p = 0; p < picks; p++)
        for (int64_t i = 0; i < n; i += LANES)
            store_some(to + p * n + i, mul(load_some(x + i, n - i), all(routes[2 * p + 1])), n - i);
}

/* The results of a row's experts, each as wide as the sum, times their weights. */
static void combine(const Combine *s, const float *x, const float *routes, float *to) {
    const int64_t n = s->to.buffer.width, picks = s->routes.width / 2;
    for (int64_t i = 0; i < n; i += LANES) {
        vec sum = all(0.0f);
        for (int64_t p = 0; p < picks; p++)
            sum = fma3(load_some(x + p * n + i, n - i), all(s->weighed ? routes[2 * p + 1] : 1.0f), sum);
        put(&s->to, to + i, sum, n - i);
    }
}

#endif
