/* Attention over the pages of a KV cache, in blocks of one page each.
 *
 * Of a block, a row has its largest score, its total of e^(score - largest), and its values weighted by these, summed
 * over the keys, first to last. A block is joined to those before it in its section, and a section to those before it;
 * what comes of it is divided by the total at the end (docs/numerics.md). Tasks may take sections apart from each other.
 * Keys that a row does not see have the weight 0, which adds nothing to finite values. */

#include "attend.h"
#include "stored.h"

#define QUERIES 6 /* rows that share what is read from the cache */
#define BATCH 32  /* rows that share a page while it is there */
#define SECTION_KEYS (SECTION_BLOCKS * PAGE)
#if WIDTH == 16
#define KEY_REGS 4
#define VALUE_REGS 4
#else
#define KEY_REGS 2
#define VALUE_REGS 2
#endif
#define ENTRIES (WIDTH == 16 ? 8 : 4) /* of values in keys that are mixed at a time */
#define CACHE_LINE 64    /* bytes */
#define TASKS_A_THREAD 4 /* at least, before sections are tasks of their own */

/* What is known of up to BATCH rows after some of their keys. */
typedef struct {
    float *most, *total; /* [BATCH] */
    float *results;      /* [rows, values], or where values are in keys [values, BATCH]; not yet divided */
} Attended;

int64_t attended_floats(const Attend *s, int64_t rows) {
    return 2 * BATCH + (s->cache.kept ? rows : BATCH) * s->cache.values;
}
INLINE Attended attended_at(float *x) { return (Attended){x, x + BATCH, x + 2 * BATCH}; }

int64_t attend_room(const Attend *s) { return BATCH * (s->cache.size + PAGE) + 2 * attended_floats(s, BATCH); }

/* The first key that the row at a position sees. */
INLINE int64_t first_seen(const Attend *s, int64_t position) {
    const int64_t of_window = s->window && position >= s->window ? position - s->window + 1 : 0;
    const int64_t of_chunk = s->chunk ? position / s->chunk * s->chunk : 0;
    return of_window > of_chunk ? of_window : of_chunk;
}

/* Up to BATCH queries of a piece that read a head's keys and values: rows of a group lie side by side. */
typedef struct {
    const Attend *step;
    const Pass *pass;
    const Piece *piece;
    int64_t head, row, rows, group;      /* `row` of the piece are before these */
    int64_t first, end;                  /* blocks that a task reads, of those that they see */
    int64_t position[BATCH], low[BATCH]; /* of each row, and the first key that it sees */
} Queries;

/* The head of a query. */
INLINE int64_t query_head(const Queries *q, int64_t r) { return q->head * q->group + (q->row + r) % q->group; }

/* Bytes of an entry of the cache. */
INLINE int64_t entry_bytes(int storage) { return storage == BFLOAT ? 2 : 4; }

/* The page of a block, among those of all heads. */
INLINE int64_t page_of(const Queries *q, int64_t block) {
    return q->pass->tables[q->piece->slot * q->pass->blocks + block] * q->step->cache.kv_heads + q->head;
}
INLINE const char *keys_of(const int storage, const Queries *q, int64_t block) {
    const Cache *c = &q->step->cache;
    return (const char *)c->keys + page_of(q, block) * c->size * PAGE * entry_bytes(storage);
}
INLINE const char *values_of(const int storage, const Queries *q, int64_t block) {
    const Cache *c = &q->step->cache;
    return (const char *)c->kept + page_of(q, block) * c->values * PAGE * entry_bytes(storage);
}

/* What is fetched meanwhile, some lines in each turn of a loop: as far as the second cache, which takes more requests at a
 * time than the first. */
typedef struct {
    const char *at;
    int64_t lines;
} Ahead;

INLINE Ahead ahead_of(const char *at, int64_t bytes, int64_t turns) {
    return (Ahead){at, at ? (bytes / CACHE_LINE + turns - 1) / turns : 0};
}
INLINE void fetch(Ahead *ahead) {
    for (int64_t l = 0; l < ahead->lines; l++, ahead->at += CACHE_LINE) __builtin_prefetch(ahead->at, 0, 2);
}

/* Scores of `rows` rows, `size` entries each, of `some` registers of keys; those of a row PAGE apart. */
INLINE void score(
    const int rows, const int storage, const int some, const float *q, const char *keys, int64_t size, float *to, Ahead ahead) {
    reg sums[QUERIES][KEY_REGS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < some; c++) sums[r][c] = reg_all(0.0f);
    for (int64_t d = 0; d < size; d++, keys += PAGE * entry_bytes(storage)) {
        fetch(&ahead);
        reg k[KEY_REGS];
#pragma GCC unroll 4
        for (int c = 0; c < some; c++) k[c] = weights(storage, keys, c * WIDTH, 0);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            reg entry = reg_all(q[r * size + d]);
#pragma GCC unroll 4
            for (int c = 0; c < some; c++) sums[r][c] = reg_fma(k[c], entry, sums[r][c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < some; c++) reg_store(to + r * PAGE + c * WIDTH, sums[r][c]);
}

/* The weighted values of some keys, in some registers of `rows` rows, joined to the results before them. */
INLINE void mix(
    const int rows, const int storage, const int wide, float *results, int64_t values, const float *before,
    const float *behind, const float *of, const char *v, int64_t keys, Ahead ahead) {
    reg all[QUERIES][VALUE_REGS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < wide; c++) all[r][c] = reg_all(0.0f);
    for (int64_t j = 0; j < keys; j++, v += values * entry_bytes(storage)) {
        fetch(&ahead);
        reg value[VALUE_REGS];
#pragma GCC unroll 4
        for (int c = 0; c < wide; c++) value[c] = weights(storage, v, c * WIDTH, 0);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            reg weight = reg_all(of[r * PAGE + j]);
#pragma GCC unroll 4
            for (int c = 0; c < wide; c++) all[r][c] = reg_fma(value[c], weight, all[r][c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < wide; c++) {
            float *to = results + r * values + c * WIDTH;
            reg_store(to, reg_fma(all[r][c], reg_all(behind[r]), reg_load(to) * reg_all(before[r])));
        }
}

/* The same for the last columns of a head, which do not fill a register. */
INLINE void mix_rest(
    int64_t rows, const int storage, int64_t columns, float *results, int64_t values, const float *before,
    const float *behind, const float *of, const char *v, int64_t keys) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            float sum = 0, *to = results + r * values + c;
            for (int64_t j = 0; j < keys; j++) {
                const char *at = v + (j * values + c) * entry_bytes(storage);
                float value;
                if (storage == BFLOAT) value = as_float((uint32_t)*(const uint16_t *)at << 16);
                else value = *(const float *)at;
                sum = __builtin_fmaf(value, of[r * PAGE + j], sum);
            }
            *to = __builtin_fmaf(sum, behind[r], *to * before[r]);
        }
}

INLINE void mix_page(
    const int rows, const int storage, float *results, int64_t values, const float *before, const float *behind,
    const float *of, const char *v, int64_t keys, Ahead ahead) {
    int64_t c = 0;
    for (; c + VALUE_REGS * WIDTH <= values; c += VALUE_REGS * WIDTH, ahead.lines = 0)
        mix(rows, storage, VALUE_REGS, results + c, values, before, behind, of, v + c * entry_bytes(storage), keys, ahead);
    for (; c + WIDTH <= values; c += WIDTH)
        mix(rows, storage, 1, results + c, values, before, behind, of, v + c * entry_bytes(storage), keys, (Ahead){0});
    if (c < values)
        mix_rest(rows, storage, values - c, results + c, values, before, behind, of, v + c * entry_bytes(storage), keys);
}

/* Some values that are entries of keys, weighted, in some registers of rows; of has the weights, [keys, BATCH]. */
INLINE void mix_entries(
    const int regs, const int entries, const float (*values)[PAGE], float *results, const float *before,
    const float *behind, const float *of, int64_t first, int64_t end, Ahead *ahead) {
    reg all[ENTRIES][2];
#define EACH_ENTRY _Pragma("GCC unroll 8") for (int e = 0; e < entries; e++)
#define EACH_REG _Pragma("GCC unroll 2") for (int c = 0; c < regs; c++)
    EACH_ENTRY EACH_REG all[e][c] = reg_all(0.0f);
    for (int64_t j = first; j < end; j++) {
        fetch(ahead);
        reg weight[2];
        EACH_REG weight[c] = reg_load(of + j * BATCH + c * WIDTH);
        EACH_ENTRY {
            const reg value = reg_all(values[e][j]);
            EACH_REG all[e][c] = reg_fma(value, weight[c], all[e][c]);
        }
    }
    EACH_ENTRY EACH_REG {
        float *to = results + e * BATCH + c * WIDTH;
        const reg old = reg_load(to) * reg_load(before + c * WIDTH);
        reg_store(to, reg_fma(all[e][c], reg_load(behind + c * WIDTH), old));
    }
#undef EACH_ENTRY
#undef EACH_REG
}

INLINE void mix_keys(
    const int storage, const int entries, int64_t rows, float *results, const float *before, const float *behind,
    const float *of, const char *v, int64_t first, int64_t end, Ahead *ahead) {
    float wide[ENTRIES][PAGE] __attribute__((aligned(64)));
    for (int e = 0; e < entries; e++)
        for (int c = 0; c < PAGE; c += WIDTH)
            reg_store(wide[e] + c, weights(storage, v + e * PAGE * entry_bytes(storage), c, 0));
    for (int64_t r = 0; r < rows; r += 2 * WIDTH) {
#define MIXED(REGS) mix_entries(REGS, entries, wide, results + r, before + r, behind + r, of + r, first, end, ahead)
        if (rows - r > WIDTH) MIXED(2);
        else MIXED(1);
#undef MIXED
        ahead->lines = 0;
    }
}

/* The weighted values of a page of keys, `v` the first of their entries, joined to the results before them; weights, of
 * `rows` rows from `begin` on, are [rows, PAGE]. Registers run over rows, which are many: all heads share the keys. */
static __attribute__((noinline)) void mix_page_of_keys(
    int storage, int64_t begin, int64_t rows, float *results, int64_t values, const float *before,
    const float *behind, const float *of, const char *v, int64_t first, int64_t end, const char *next, int64_t bytes) {
    float turned[PAGE * BATCH] __attribute__((aligned(64)));
    memset(turned + first * BATCH, 0, sizeof(float) * (end - first) * BATCH);
    for (int64_t r = begin; r < begin + rows; r++)
        for (int64_t j = first; j < end; j++) turned[j * BATCH + r] = of[r * PAGE + j];
    Ahead ahead = ahead_of(next, bytes, values / ENTRIES * (end - first) + 1);
    const int64_t lines = ahead.lines, page = PAGE * entry_bytes(storage);
    for (int64_t c = 0, some; c < values; c += some, ahead.lines = ahead.at < next + bytes ? lines : 0) {
        float *to = results + c * BATCH;
        some = values - c < ENTRIES ? 1 : ENTRIES;
#define MIXED(COUNT) \
    mix_keys(storage, COUNT, begin + rows, to, before, behind, turned, v + c * page, first, end, &ahead)
        if (some == 1) MIXED(1);
        else MIXED(ENTRIES);
#undef MIXED
    }
}

#define EACH_QUERIES(CALL, ...) \
    switch (step) { \
    case 6: CALL(6, __VA_ARGS__); break; \
    case 5: CALL(5, __VA_ARGS__); break; \
    case 4: CALL(4, __VA_ARGS__); break; \
    case 3: CALL(3, __VA_ARGS__); break; \
    case 2: CALL(2, __VA_ARGS__); break; \
    default: CALL(1, __VA_ARGS__); \
    }

INLINE vec or_zero(vec most) { return where_more(most, all(-INFINITY), most, all(0.0f)); }

/* Scores of a row, the last that it sees at `high` - 1, become scaled ones, of keys from `low` on, and -INFINITY of the
 * others up to `count`. `slope` is null, or that of the head. Returns the largest. */
INLINE float scaled(const Attend *s, const float *slope, float *scores, int64_t low, int64_t high, int64_t count) {
    static const float numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vec scale = all((float)s->scale), cap = all((float)s->softcap), none = all(-INFINITY), lanes = load(numbers);
    vec top = none;
    for (int64_t j = 0; j < count; j += LANES) {
        vec x = mul(load(scores + j), scale);
        if (s->softcap) x = mul(tangent(quotient(x, cap)), cap);
        if (slope) x = fma3(all(*slope), add(lanes, all((float)(j + 1 - high))), x);
        if (j < low) x = where_more(all((float)(low - j)), lanes, none, x);
        if (j + LANES > high) x = where_more(all((float)(high - j)), lanes, x, none);
        store(scores + j, x);
        top = more_of(x, top);
    }
    return most_of(top);
}

/* Scores of a row become weights. Returns their total. */
INLINE float weigh(float *scores, float most, int64_t count) {
    const vec shift = or_zero(all(most));
    vec total = all(0.0f);
    for (int64_t j = 0; j < count; j += LANES) {
        const vec x = exponential(sub(load(scores + j), shift));
        store(scores + j, x);
        total = add(total, x);
    }
    return fold(total);
}

/* What the results before and those behind are multiplied by when they are joined, of BATCH rows each; joins what else is
 * known. */
static void join_totals(
    Attended to, const float *most, const float *total, int64_t rows, float *before, float *behind) {
    for (int64_t r = 0; r < rows; r += LANES) {
        const vec old = load(to.most + r), new = load(most + r), top = where_more(new, old, new, old), shift = or_zero(top);
        const vec a = exponential(sub(old, shift)), b = exponential(sub(new, shift));
        store(before + r, a), store(behind + r, b), store(to.most + r, top);
        store(to.total + r, fma3(load(total + r), b, mul(load(to.total + r), a)));
    }
}

/* Joins a block of keys to those before it; `next` are the keys that are read then. */
INLINE void attend_block(
    const int storage, const Queries *q, int64_t block, const char *next, const float *queries, float *weights, Attended to) {
    const Attend *s = q->step;
    const int64_t size = s->cache.size, values = s->cache.values, first = block * PAGE;
    const char *keys = keys_of(storage, q, block), *v = s->cache.kept ? values_of(storage, q, block) : 0;
    float most[BATCH], total[BATCH], before[BATCH], behind[BATCH];
    int64_t begin = 0, end = q->rows;
    for (int64_t r = 0; r < BATCH; r++) most[r] = -INFINITY, total[r] = 0;
    while (begin < end && q->position[begin] < first) begin++;
    while (end > begin && q->low[end - 1] >= first + PAGE) end--;
    const int64_t last = end > begin ? q->position[end - 1] + 1 - first : 0, seen = last < PAGE ? last : PAGE;
    Ahead ahead = ahead_of(v, values * seen * entry_bytes(storage), size);
    for (int64_t r = begin, step; r < end; r += step) {
        step = end - r < QUERIES ? end - r : QUERIES;
        const int64_t left = q->position[r + step - 1] + 1 - first, count = left < PAGE ? left : PAGE;
        for (int64_t c = 0, some; c < count; c += some * WIDTH, ahead.lines = 0) {
            some = count - c > KEY_REGS / 2 * WIDTH ? KEY_REGS : KEY_REGS / 2;
            const float *of = queries + r * size;
            const char *from = keys + c * entry_bytes(storage);
            if (some == KEY_REGS) EACH_QUERIES(score, storage, KEY_REGS, of, from, size, weights + r * PAGE + c, ahead)
            else EACH_QUERIES(score, storage, KEY_REGS / 2, of, from, size, weights + r * PAGE + c, ahead)
        }
    }
    for (int64_t r = begin; r < end; r++) {
        const float *slope = s->slopes ? s->slopes + query_head(q, r) : 0;
        most[r] = scaled(s, slope, weights + r * PAGE, q->low[r] - first, q->position[r] + 1 - first, seen);
    }
    for (int64_t r = begin; r < end; r++) total[r] = weigh(weights + r * PAGE, most[r], seen);
    join_totals(to, most, total, q->rows, before, behind);
    if (!s->cache.kept) {
        const int64_t low = q->low[begin] - first, page = PAGE * entry_bytes(storage);
        if (begin < end)
            mix_page_of_keys(storage, begin, end - begin, to.results, values, before, behind, weights,
                             keys + (size - values) * page, low < 0 ? 0 : low, seen, next, size * page);
        return;
    }
    ahead = ahead_of(next, size * PAGE * entry_bytes(storage), PAGE);
    for (int64_t r = begin, step; r < end; r += step, ahead.lines = 0) {
        step = end - r < QUERIES ? end - r : QUERIES;
        const int64_t low = q->low[r] - first, from = low < 0 ? 0 : low;
        const int64_t left = q->position[r + step - 1] + 1 - first, count = (left < PAGE ? left : PAGE) - from;
        EACH_QUERIES(mix_page, storage, to.results + r * values, values, before + r, behind + r, weights + r * PAGE + from,
                     v + from * values * entry_bytes(storage), count, ahead)
    }
}

INLINE void nothing_known(const Queries *q, Attended to) {
    for (int64_t r = 0; r < BATCH; r++) to.most[r] = -INFINITY, to.total[r] = 0;
    memset(to.results, 0, sizeof(float) * (attended_floats(q->step, q->rows) - 2 * BATCH));
}

/* A section of keys by itself, of those that a task reads; `after` has what is read behind the last of these. */
INLINE void section_of(
    const int storage, const Queries *q, int64_t section, const Queries *after, const float *queries, float *weights,
    Attended to) {
    const int64_t low = section * SECTION_BLOCKS, high = low + SECTION_BLOCKS;
    nothing_known(q, to);
    for (int64_t block = low < q->first ? q->first : low; block < (high < q->end ? high : q->end); block++) {
        const char *next = block + 1 < q->end ? keys_of(storage, q, block + 1) : after ? keys_of(storage, after, after->first) : 0;
        attend_block(storage, q, block, next, queries, weights, to);
    }
}

static void section_of_floats(
    const Queries *q, int64_t section, const Queries *after, const float *queries, float *weights, Attended to) {
    section_of(FLOAT, q, section, after, queries, weights, to);
}
static void section_of_bfloats(
    const Queries *q, int64_t section, const Queries *after, const float *queries, float *weights, Attended to) {
    section_of(BFLOAT, q, section, after, queries, weights, to);
}

/* Joins a section to those before it. */
static void join_section(const Queries *q, Attended to, Attended section) {
    float before[BATCH], behind[BATCH];
    const int64_t values = q->step->cache.values;
    join_totals(to, section.most, section.total, q->rows, before, behind);
    if (!q->step->cache.kept) {
        for (int64_t c = 0; c < values * BATCH; c += BATCH)
            for (int64_t r = 0; r < q->rows; r += LANES) {
                const vec old = mul(load(to.results + c + r), load(before + r));
                store(to.results + c + r, fma3(load(section.results + c + r), load(behind + r), old));
            }
        return;
    }
    for (int64_t r = 0; r < q->rows; r++)
        for (int64_t c = r * values; c < (r + 1) * values; c += LANES) {
            const int64_t left = (r + 1) * values - c;
            const vec old = mul(load_some(to.results + c, left), all(before[r]));
            store_some(to.results + c, fma3(load_some(section.results + c, left), all(behind[r]), old), left);
        }
}

/* Joins a score of each head that has no value. */
static void join_sinks(const Queries *q, Attended to, Attended none) {
    nothing_known(q, none);
    for (int64_t r = 0; r < q->rows; r++) {
        none.most[r] = q->step->sinks[query_head(q, r)];
        none.total[r] = 1;
    }
    join_section(q, to, none);
}

static void take_queries(const Queries *q, const float *x, int64_t x_row, float *to) {
    const int64_t size = q->step->cache.size;
    for (int64_t r = 0; r < q->rows; r++) {
        const int64_t row = q->row + r, number = query_head(q, r);
        memcpy(to + r * size, x + (q->piece->row + row / q->group) * x_row + number * size, sizeof(float) * size);
    }
}

static void put_results(const Queries *q, Attended from, float *to, int64_t to_row) {
    const int64_t values = q->step->cache.values;
    float turned[LANES] = {0};
    for (int64_t r = 0; r < q->rows; r++) {
        const int64_t row = q->row + r, number = query_head(q, r);
        float *out = to + (q->piece->row + row / q->group) * to_row + number * values;
        for (int64_t c = 0; c < values; c += LANES) { /* 0 is all there is: a weight of 0 would turn -0 to 0 */
            const float *x = from.results + r * values + c;
            if (!q->step->cache.kept) {
                for (int64_t l = c; l < c + LANES && l < values; l++) turned[l - c] = from.results[l * BATCH + r];
                x = turned;
            }
            store_some(out + c, add(quotient(load_some(x, values - c), all(from.total[r])), all(0.0f)), values - c);
        }
    }
}

int alike(const Attend *a, const Attend *b) {
    const Cache *c = &a->cache, *d = &b->cache;
    return c->heads == d->heads && c->kv_heads == d->kv_heads && c->values == d->values && !c->kept == !d->kept &&
           a->window == b->window && a->chunk == b->chunk;
}

INLINE int64_t rows_of_piece(const Attend *s, const Piece *p) { return p->tokens * (s->cache.heads / s->cache.kv_heads); }
INLINE int64_t batches_of(const Attend *s, const Piece *p) { return (rows_of_piece(s, p) + BATCH - 1) / BATCH; }
INLINE int64_t first_section(const Attend *s, const Piece *p) { return first_seen(s, p->start) / SECTION_KEYS; }
INLINE int64_t sections_of(const Attend *s, const Piece *p) {
    return (p->start + p->tokens - 1) / SECTION_KEYS - first_section(s, p) + 1;
}

AttendTasks attend_tasks(const Attend *s, const Pass *pass, int64_t *firsts) {
    AttendTasks made = {.firsts = firsts};
    int64_t all = 0;
    for (const Piece *p = pass->piece; p < pass->piece + pass->pieces; p++) {
        const int64_t rows = rows_of_piece(s, p), batches = s->cache.kv_heads * batches_of(s, p);
        made.rows = rows > made.rows ? rows : made.rows;
        made.total += batches, all += batches * sections_of(s, p);
    }
    made.rows = made.rows < BATCH ? made.rows : BATCH;
    made.by_sections = made.total < TASKS_A_THREAD * pass->threads && pass->threads > 1 && all > made.total;
    if (made.by_sections) made.total = all;
    for (int64_t i = 0, first = 0; firsts && i < pass->pieces; i++) {
        const Piece *p = pass->piece + i;
        firsts[i] = first, first += s->cache.kv_heads * batches_of(s, p) * (made.by_sections ? sections_of(s, p) : 1);
    }
    return made;
}

/* What a task reads. */
static Queries queries_of(const Attend *s, const Pass *pass, AttendTasks tasks, int64_t whole) {
    int64_t i = 0;
    while (i + 1 < pass->pieces && whole >= tasks.firsts[i + 1]) i++;
    const Piece *p = pass->piece + i;
    const int64_t each = tasks.by_sections ? sections_of(s, p) : 1, task = whole - tasks.firsts[i];
    const int64_t heads = s->cache.kv_heads, rows = rows_of_piece(s, p), row = task / each / heads * BATCH;
    Queries q = {.step = s, .pass = pass, .piece = p, .head = task / each % heads, .row = row};
    q.group = s->cache.heads / heads;
    q.rows = rows - row < BATCH ? rows - row : BATCH;
    for (int64_t r = 0; r < q.rows; r++) {
        q.position[r] = p->start + (row + r) / q.group;
        q.low[r] = first_seen(s, q.position[r]);
    }
    q.first = q.low[0] / PAGE, q.end = q.position[q.rows - 1] / PAGE + 1;
    if (each > 1) {
        const int64_t begin = (first_section(s, p) + task % each) * SECTION_BLOCKS, end = begin + SECTION_BLOCKS;
        q.first = begin > q.first ? begin : q.first, q.end = end < q.end ? end : q.end;
    }
    return q;
}

void attend_task(const Attend *s, const Pass *pass, AttendTasks tasks, int64_t whole, AttendMemory at) {
    const int64_t likely = whole + pass->threads; /* the thread's next task, if others take as long as this one */
    const Queries q = queries_of(s, pass, tasks, whole);
    const Queries after = likely < tasks.total ? queries_of(s, pass, tasks, likely) : q;
    const int64_t first = first_section(s, q.piece), sections = sections_of(s, q.piece);
    float *queries = at.scratch, *weights = queries + BATCH * s->cache.size, *known = weights + BATCH * PAGE;
    Attended all = attended_at(known), part = attended_at(known + attended_floats(s, BATCH));
    take_queries(&q, at.x, at.x_row, queries);
#define SECTION_OF(SECTION, TO) \
    (s->cache.storage == BFLOAT ? section_of_bfloats : section_of_floats)( \
        &q, SECTION, likely < tasks.total ? &after : 0, queries, weights, TO)
    if (!tasks.by_sections || sections == 1) {
        SECTION_OF(first, all);
        for (int64_t section = 1; section < sections; section++) {
            SECTION_OF(first + section, part);
            join_section(&q, all, part);
        }
    } else {
        const int64_t floats = attended_floats(s, tasks.rows), task = whole - tasks.firsts[q.piece - pass->piece];
        const int64_t own = task % sections, start = whole - own;
        SECTION_OF(first + own, attended_at(at.parts + whole * floats));
        if (atomic_fetch_add(at.joined + start, 1) + 1 < sections) return;
        atomic_store(at.joined + start, 0);
        all = attended_at(at.parts + start * floats);
        for (int64_t section = 1; section < sections; section++)
            join_section(&q, all, attended_at(at.parts + (start + section) * floats));
    }
#undef SECTION_OF
    if (s->sinks) join_sinks(&q, all, part);
    put_results(&q, all, at.to, at.to_row);
}
