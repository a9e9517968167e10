/* Attention over the pages of a KV cache.
 *
 * A score is summed over the head's entries, first to last, and scaled. The weights e^(score - largest) of a row are
 * summed in sixteen lanes, by the key's position, and folded; a result is summed over the keys, first to last, and
 * divided by that. Keys that a row does not see have the weight 0, which adds nothing to finite values. */

#ifndef DETGEN_ATTEND
#define DETGEN_ATTEND

#include "lanes.h"
#include "layout.h"

#define QUERIES 4 /* rows that share what is read from the cache */
#define BATCH 32  /* rows that share a page while it is there */
#if WIDTH == 16
#define KEY_REGS 4
#define VALUE_REGS 4
#else
#define KEY_REGS 2
#define VALUE_REGS 2
#endif

/* Scores of `rows` rows, `size` entries each, with `wide` registers of keys; those of a row `stride` apart. */
INLINE void score(
    const int rows, const float *q, int64_t q_row, const float *keys, int64_t size, float *to, int64_t stride) {
    reg sums[QUERIES][KEY_REGS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < KEY_REGS; c++) sums[r][c] = reg_all(0.0f);
    for (int64_t d = 0; d < size; d++) {
        reg k[KEY_REGS];
#pragma GCC unroll 4
        for (int c = 0; c < KEY_REGS; c++) k[c] = reg_load(keys + d * PAGE + c * WIDTH);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            reg entry = reg_all(q[r * q_row + d]);
#pragma GCC unroll 4
            for (int c = 0; c < KEY_REGS; c++) sums[r][c] = reg_fma(k[c], entry, sums[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < KEY_REGS; c++) reg_store(to + r * stride + c * WIDTH, sums[r][c]);
}

/* Adds the weighted values of some keys, `v_key` entries apart, to registers of the sums of `rows` rows. */
INLINE void mix(
    const int rows, const int wide, float *sums, int64_t values, const float *weights, int64_t stride, const float *v,
    int64_t v_key, int64_t keys) {
    reg all[QUERIES][VALUE_REGS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < wide; c++) all[r][c] = reg_load(sums + r * values + c * WIDTH);
    for (int64_t j = 0; j < keys; j++) {
        reg value[VALUE_REGS];
#pragma GCC unroll 4
        for (int c = 0; c < wide; c++) value[c] = reg_load(v + j * v_key + c * WIDTH);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            reg weight = reg_all(weights[r * stride + j]);
#pragma GCC unroll 4
            for (int c = 0; c < wide; c++) all[r][c] = reg_fma(value[c], weight, all[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < wide; c++) reg_store(sums + r * values + c * WIDTH, all[r][c]);
}

/* The same for the last columns of a head, which do not fill a register. */
INLINE void mix_rest(
    int64_t rows, int64_t columns, float *sums, int64_t values, const float *weights, int64_t stride, const float *v,
    int64_t v_key, int64_t keys) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < keys; j++)
            for (int64_t c = 0; c < columns; c++)
                sums[r * values + c] = __builtin_fmaf(v[j * v_key + c], weights[r * stride + j], sums[r * values + c]);
}

INLINE void mix_page(
    const int rows, float *sums, int64_t values, const float *weights, int64_t stride, const float *v, int64_t v_key,
    int64_t keys) {
    int64_t c = 0;
    for (; c + VALUE_REGS * WIDTH <= values; c += VALUE_REGS * WIDTH)
        mix(rows, VALUE_REGS, sums + c, values, weights, stride, v + c, v_key, keys);
    for (; c + WIDTH <= values; c += WIDTH) mix(rows, 1, sums + c, values, weights, stride, v + c, v_key, keys);
    if (c < values) mix_rest(rows, values - c, sums + c, values, weights, stride, v + c, v_key, keys);
}

/* Scores of keys `first` to `last` - 1, whole vectors, become weights: 0 but for keys from `low` to `high` - 1. Returns
 * their sum. */
static float weigh(const Attend *s, float *weights, int64_t first, int64_t last, int64_t low, int64_t high) {
    static const float numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vec scale = all((float)s->scale), cap = all((float)s->softcap), none = all(-INFINITY), lanes = load(numbers);
    vec most = none;
    for (int64_t j = first; j < last; j += LANES) {
        vec x = mul(load(weights + j - first), scale);
        if (s->softcap) x = mul(tangent(quotient(x, cap)), cap);
        if (j < low) x = where_more(all((float)(low - j)), lanes, none, x);
        if (j + LANES > high) x = where_more(all((float)(high - j)), lanes, x, none);
        store(weights + j - first, x);
        most = where_more(x, most, x, most);
    }
    vec top = all(most_of(most)), total = all(0.0f);
    for (int64_t j = first; j < last; j += LANES) {
        vec x = exponential(sub(load(weights + j - first), top));
        store(weights + j - first, x);
        total = add(total, x);
    }
    return fold(total);
}

INLINE int64_t rounded_up(int64_t x) { return (x + PAGE - 1) / PAGE * PAGE; }

/* The first key that the row at a position sees. */
INLINE int64_t first_seen(const Attend *s, int64_t position) {
    const int64_t of_window = s->window && position >= s->window ? position - s->window + 1 : 0;
    const int64_t of_chunk = s->chunk ? position / s->chunk * s->chunk : 0;
    return of_window > of_chunk ? of_window : of_chunk;
}

/* Scores of a row of a piece: of all pages that any of its rows sees. */
INLINE int64_t span(const Attend *s, const Piece *p) {
    return rounded_up(p->start + p->tokens) - first_seen(s, p->start) / PAGE * PAGE;
}

/* Floats that a piece needs. */
static int64_t attend_room(const Attend *s, const Piece *p) {
    const int64_t rows = p->tokens * (s->cache.heads / s->cache.kv_heads);
    return (rows < BATCH ? rows : BATCH) * (s->cache.size + s->cache.values + span(s, p) + 1) + 4 * LANES;
}

/* The keys that any of some rows sees, from `low` to `high` - 1. */
typedef struct {
    int64_t low, high;
} Seen;

INLINE Seen seen(const Attend *s, const Piece *p, int64_t row, int64_t rows) {
    const int64_t group = s->cache.heads / s->cache.kv_heads;
    return (Seen){first_seen(s, p->start + row / group), p->start + (row + rows - 1) / group + 1};
}

#define EACH_QUERIES(CALL, ...) \
    if (step == 4) CALL(4, __VA_ARGS__); \
    else if (step == 3) CALL(3, __VA_ARGS__); \
    else if (step == 2) CALL(2, __VA_ARGS__); \
    else CALL(1, __VA_ARGS__)

/* One head's keys and values, for some queries of a piece that read them: `row` of them are before these. */
static void attend_batch(const Attend *s, const Pass *pass, const Piece *p, int64_t head, int64_t row, int64_t rows,
                         const float *x, int64_t x_row, float *to, int64_t to_row, float *scratch) {
    const int64_t size = s->cache.size, values = s->cache.values, kv_heads = s->cache.kv_heads;
    const int64_t group = s->cache.heads / kv_heads, v_key = kv_heads * values;
    const Seen any = seen(s, p, row, rows);
    const int64_t first = any.low / PAGE * PAGE, stride = rounded_up(any.high) - first;
    const int64_t *table = pass->tables + p->slot * pass->blocks;
    float *queries = scratch, *sums = queries + rows * size, *weights = sums + rows * values;
    float *totals = weights + rows * stride;
    for (int64_t r = 0; r < rows; r++)
        memcpy(queries + r * size, x + (p->row + (row + r) / group) * x_row + (head * group + (row + r) % group) * size,
               sizeof(float) * size);
    memset(sums, 0, sizeof(float) * rows * values);
    for (int64_t j = first; j < any.high; j += PAGE) {
        const float *keys = s->cache.keys + (table[j / PAGE] * kv_heads + head) * size * PAGE;
        for (int64_t r = 0, step; r < rows; r += step) {
            step = rows - r < QUERIES ? rows - r : QUERIES;
            const int64_t left = seen(s, p, row + r, step).high - j, count = left < PAGE ? left : PAGE;
            for (int64_t c = 0; c < count; c += KEY_REGS * WIDTH)
                EACH_QUERIES(score, queries + r * size, size, keys + c, size, weights + r * stride + j - first + c, stride);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const Seen keys = seen(s, p, row + r, 1);
        const int64_t from = keys.low / LANES * LANES, end = (keys.high + LANES - 1) / LANES * LANES;
        float *w = weights + r * stride;
        totals[r] = weigh(s, w + from - first, from, end, keys.low, keys.high);
        memset(w, 0, sizeof(float) * (from - first));
        memset(w + end - first, 0, sizeof(float) * (first + stride - end));
    }
    for (int64_t j = first; j < any.high; j += PAGE) {
        const float *v = s->cache.kept + table[j / PAGE] * PAGE * v_key + head * values;
        for (int64_t r = 0, step; r < rows; r += step) {
            step = rows - r < QUERIES ? rows - r : QUERIES;
            const Seen keys = seen(s, p, row + r, step);
            const int64_t from = keys.low < j ? j : keys.low, end = j + PAGE < keys.high ? j + PAGE : keys.high;
            if (from >= end) continue;
            EACH_QUERIES(mix_page, sums + r * values, values, weights + r * stride + from - first, stride,
                         v + (from - j) * v_key, v_key, end - from);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        float *out = to + (p->row + (row + r) / group) * to_row + (head * group + (row + r) % group) * values;
        for (int64_t c = 0; c < values; c += LANES) /* 0 is all there is: a weight of 0 would turn -0 to 0 */
            store_some(out + c, add(quotient(load_some(sums + r * values + c, values - c), all(totals[r])), all(0.0f)),
                       values - c);
    }
}

/* One head's keys and values, for all queries of a piece that read them. */
static void attend(const Attend *s, const Pass *pass, const Piece *p, int64_t head, const float *x, int64_t x_row, float *to,
                   int64_t to_row, float *scratch) {
    const int64_t all = p->tokens * (s->cache.heads / s->cache.kv_heads);
    for (int64_t row = 0; row < all; row += BATCH)
        attend_batch(s, pass, p, head, row, all - row < BATCH ? all - row : BATCH, x, x_row, to, to_row, scratch);
}

#endif
