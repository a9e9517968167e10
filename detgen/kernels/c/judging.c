/* Rows as masks leave them, the best entries of each, and log-probabilities; docs/numerics.md states the order of their sums. */

#include <stdatomic.h>
#include <string.h>

#include "logits.h"
#include "pool.h"
#include "score.h"

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

static void mask_rows(void *of, int thread) {
    Progress *progress = of;
    const Masked *m = progress->of;
    const int64_t n = m->of.vocabulary;
    (void)thread;
    for (int64_t i; (i = atomic_fetch_add(&progress->next, 1)) < m->of.count;) {
        const float *x = row_of(&m->of, i);
        float *to = m->to + i * n;
        const uint8_t *bits = m->masks[i];
        if (!bits) {
            memcpy(to, x, n * sizeof *to);
            continue;
        }
        for (int64_t j = 0; j < n; j += SIDE) {
            const int64_t some = n - j < SIDE ? n - j : SIDE, left = m->sizes[i] - j / 8;
            uint64_t allowed = 0;
            for (int64_t b = 0; b < SIDE / 8 && b < left; b++) allowed |= (uint64_t)bits[j / 8 + b] << 8 * b;
            if (some == SIDE)
                for (int l = 0; l < SIDE; l++) to[j + l] = allowed >> l & 1 || x[j + l] != x[j + l] ? x[j + l] : -INFINITY;
            else
                for (int l = 0; l < some; l++) to[j + l] = allowed >> l & 1 || x[j + l] != x[j + l] ? x[j + l] : -INFINITY;
        }
    }
}

/* Copies rows; entries that are not allowed become -inf, but NaN. */
void mask(const Masked *m) {
    Progress progress = {m, 0};
    together(mask_rows, &progress, (int)m->of.threads);
}

/* The logarithm of the sum of e^(x - top), as score.h adds it up. */
static float log_sum(const float *x, int64_t n, float top) {
    vec total = all(0.0f);
    for (int64_t j = 0; j < n;) {
        float tops[LANES], totals[LANES] = {0}, rest[LOGIT_BLOCK];
        for (int l = 0; l < LANES; l++, j += LOGIT_BLOCK) {
            const float *block = x + j;
            tops[l] = -INFINITY;
            if (j >= n) continue;
            if (n - j < LOGIT_BLOCK) {
                for (int i = 0; i < LOGIT_BLOCK; i++) rest[i] = i < n - j ? block[i] : -INFINITY;
                block = rest;
            }
            const Peak peak = peak_of_block(block);
            tops[l] = peak.top, totals[l] = peak.total;
        }
        total = with_blocks(total, load(tops), load(totals), top);
    }
    return log_of(fold(total));
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

/* The RANKED largest entries, descending, the first of ties first; -1 and -INFINITY where there are no more. */
static void rank(const float *x, int64_t n, int64_t *ids, float *values) {
    for (int r = 0; r < RANKED; r++) ids[r] = -1, values[r] = -INFINITY;
    for (int64_t j = 0; j < n; j += SIDE) {
        const int some = n - j < SIDE ? n - j : SIDE;
        const float least = values[RANKED - 1];
        int32_t any = 0;
        if (some == SIDE)
            for (int l = 0; l < SIDE; l++) any |= x[j + l] > least;
        if (some == SIDE && !any) continue;
        for (int l = 0; l < some; l++) {
            int r = RANKED;
            for (; r > 0 && x[j + l] > values[r - 1]; r--)
                if (r < RANKED) ids[r] = ids[r - 1], values[r] = values[r - 1];
            if (r < RANKED) ids[r] = j + l, values[r] = x[j + l];
        }
    }
}

static void rank_rows(void *of, int thread) {
    Progress *progress = of;
    const Ranked *r = progress->of;
    (void)thread;
    for (int64_t i; (i = atomic_fetch_add(&progress->next, 1)) < r->of.count;) {
        const float *x = row_of(&r->of, i), top = largest(x, r->of.vocabulary), rest = log_sum(x, r->of.vocabulary, top);
        float *values = r->values + i * RANKED;
        rank(x, r->of.vocabulary, r->ids + i * RANKED, values);
        for (int k = 0; k < RANKED; k++) r->logprobs[i * RANKED + k] = values[k] - top - rest;
    }
}

/* The largest entries of rows, and their log-probabilities. */
void ranked(const Ranked *r) {
    Progress progress = {r, 0};
    together(rank_rows, &progress, (int)r->of.threads);
}
