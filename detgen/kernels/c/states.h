/* Layers that keep a state of each sequence: see detgen/program/states.py. A task has some columns of one sequence, and
 * no other task reads or writes what it keeps of them. */

#ifndef DETGEN_STATES
#define DETGEN_STATES

#include "layout.h"
#include "rowwise.h"
#include "score.h"

#define CHANNELS_A_TASK 256
#define VALUES_A_TASK 64 /* columns of a state, of which those of a task stay in the first cache */
#define VECTORS (VALUES_A_TASK / LANES)

typedef struct {
    float *at;
    int64_t apart;
} RowsOf;

INLINE int64_t blocks_of_channels(const Convolve *s) { return (s->x.width + CHANNELS_A_TASK - 1) / CHANNELS_A_TASK; }

static void convolve_task(const Convolve *s, const Pass *pass, int64_t task, RowsOf x, RowsOf to) {
    const int64_t blocks = blocks_of_channels(s), width = s->x.width, first = task % blocks * CHANNELS_A_TASK;
    const int64_t end = width - first < CHANNELS_A_TASK ? width : first + CHANNELS_A_TASK;
    const Span span = pass->span[task / blocks];
    float *kept = (float *)s->kept + span.slot * s->ring * width;
    for (int64_t row = 0; row < span.tokens; row++)
        for (int64_t c = first; c < end; c += LANES) {
            const int64_t n = end - c;
            vec y = all(0.0f);
            for (int64_t tap = 0; tap < s->taps; tap++) {
                const int64_t from = row - s->taps + 1 + tap, position = span.start + from;
                const float *seen = from >= 0       ? x.at + (span.row + from) * x.apart
                                    : position >= 0 ? kept + position % s->ring * width
                                                    : 0;
                const vec v = seen ? load_some(seen + c, n) : all(0.0f);
                y = fma3(load_some(s->weight + tap * width + c, n), v, y);
            }
            if (s->bias) y = add(y, load_some(s->bias + c, n));
            store_some(to.at + (span.row + row) * to.apart + c, activated(s->activation, y), n);
        }
    for (int64_t row = span.tokens > s->ring ? span.tokens - s->ring : 0; row < span.tokens; row++)
        memcpy(kept + (span.start + row) % s->ring * width + first, x.at + (span.row + row) * x.apart + first,
               sizeof(float) * (end - first));
}

static float first_of(vec v) {
    float lanes[LANES];
    store(lanes, v);
    return lanes[0];
}

/* log(1 + e^x) by the exponential of -|x|; the logarithm in float64. */
INLINE float softplus_by(float e, float x) {
    return (x < 0 ? 0.0f : x) + (e == e ? (float)logarithm(1 + (double)e) : e);
}
static float softplus(float x) { return softplus_by(first_of(exponential(all(-fabsf(x)))), x); }
static vec softplus_of(vec x) {
    float of[LANES], e[LANES];
    store(of, x), store(e, exponential(mul(magnitude(x), all(-1.0f))));
    for (int i = 0; i < LANES; i++) of[i] = softplus_by(e[i], of[i]);
    return load(of);
}

/* A delta rule or a state space; what one of them lacks is null. */
typedef struct {
    Buffer qkv, decay, strength, to;
    const float *rates, *bias, *skip;
    int64_t heads, key_heads, size, values, ring;
    float *state, *kept, least, most;
} Recurrence;

#define COMMON(S)                                                                                                          \
    .qkv = (S)->qkv, .decay = (S)->decay, .to = (S)->to, .rates = (S)->rates, .bias = (S)->bias, .heads = (S)->heads,         \
    .key_heads = (S)->key_heads, .size = (S)->size, .values = (S)->values, .ring = (S)->ring, .state = (float *)(S)->state, \
    .kept = (float *)(S)->kept

INLINE Recurrence rule_of(const DeltaRule *s) { return (Recurrence){COMMON(s), .strength = s->strength}; }
INLINE Recurrence space_of(const StateSpace *s) {
    return (Recurrence){COMMON(s), .strength = s->decay, .skip = s->skip, .least = (float)s->least, .most = (float)s->most};
}

INLINE int64_t blocks_of_values(const Recurrence *s) { return (s->values + VALUES_A_TASK - 1) / VALUES_A_TASK; }
INLINE int64_t recurrence_tasks(const Pass *pass, Recurrence s) { return pass->spans * s.heads * blocks_of_values(&s); }

typedef struct {
    RowsOf qkv, decay, strength, to;
    float *state; /* [size, VALUES_A_TASK] */
} RecurrenceMemory;

/* What a row adds to a state. */
typedef struct {
    const float *key;
    vec value[VECTORS];
    float decay, strength;
} Added;

/* Some values, zeros behind them. */
INLINE void load_values(vec *to, const float *x, int64_t n) {
    for (int j = 0; j < VECTORS; j++) to[j] = n > j * LANES ? load_some(x + j * LANES, n - j * LANES) : all(0.0f);
}

/* A row of a delta rule. */
INLINE void correct(float *state, int64_t size, const Added *row) {
    vec sums[VECTORS];
    const vec decay = all(row->decay), strength = all(row->strength);
    for (int j = 0; j < VECTORS; j++) sums[j] = all(0.0f);
    for (int64_t i = 0; i < size; i++) {
        const vec key = all(row->key[i]);
        for (int j = 0; j < VECTORS; j++) {
            float *at = state + i * VALUES_A_TASK + j * LANES;
            const vec left = mul(load(at), decay);
            store(at, left);
            sums[j] = fma3(left, key, sums[j]);
        }
    }
    for (int j = 0; j < VECTORS; j++) sums[j] = mul(sub(row->value[j], sums[j]), strength);
    for (int64_t i = 0; i < size; i++) {
        const vec key = all(row->key[i]);
        for (int j = 0; j < VECTORS; j++) {
            float *at = state + i * VALUES_A_TASK + j * LANES;
            store(at, fma3(key, sums[j], load(at)));
        }
    }
}

INLINE void ask(const float *state, int64_t size, const float *query, float *to, int64_t n) {
    vec sums[VECTORS];
    for (int j = 0; j < VECTORS; j++) sums[j] = all(0.0f);
    for (int64_t i = 0; i < size; i++) {
        const vec entry = all(query[i]);
        for (int j = 0; j < VECTORS; j++) sums[j] = fma3(load(state + i * VALUES_A_TASK + j * LANES), entry, sums[j]);
    }
    for (int j = 0; j < VECTORS && j * LANES < n; j++) store_some(to + j * LANES, sums[j], n - j * LANES);
}

/* A row of a state space, and what its query finds behind it, if there is one. */
INLINE void add_to(float *state, int64_t size, const Added *row, const float *query, vec *sums) {
    const vec decay = all(row->decay), strength = all(row->strength);
    vec value[VECTORS];
    for (int j = 0; j < VECTORS; j++) value[j] = mul(row->value[j], strength), sums[j] = all(0.0f);
    for (int64_t i = 0; i < size; i++) {
        const vec key = all(row->key[i]), entry = all(query ? query[i] : 0.0f);
        for (int j = 0; j < VECTORS; j++) {
            float *at = state + i * VALUES_A_TASK + j * LANES;
            const vec left = fma3(key, value[j], mul(load(at), decay));
            store(at, left);
            if (query) sums[j] = fma3(left, entry, sums[j]);
        }
    }
}

INLINE void move_on(float *state, const Recurrence *s, const Added *row) {
    vec nothing[VECTORS];
    if (s->skip) add_to(state, s->size, row, 0, nothing);
    else correct(state, s->size, row);
}

/* The same, and the results of the row. */
INLINE void compute_row(float *state, const Recurrence *s, int64_t head, const Added *row, const float *query, float *to,
                        int64_t n) {
    if (!s->skip) {
        correct(state, s->size, row);
        ask(state, s->size, query, to, n);
        return;
    }
    vec sums[VECTORS];
    add_to(state, s->size, row, query, sums);
    for (int j = 0; j < VECTORS && j * LANES < n; j++)
        store_some(to + j * LANES, fma3(row->value[j], all(s->skip[head]), sums[j]), n - j * LANES);
}

/* What is left of a state, and how much of a row is added. */
INLINE void gates_of(const Recurrence *s, int64_t head, float decay, float strength, Added *row) {
    float step = softplus(decay + s->bias[head]);
    if (s->skip) step = step < s->least ? s->least : step > s->most ? s->most : step;
    row->decay = first_of(exponential(all(step * s->rates[head])));
    row->strength = s->skip ? step : first_of(sigmoid(all(strength)));
}

INLINE int64_t blocks_of_scan(const SelectiveScan *s) { return (s->values + VALUES_A_TASK - 1) / VALUES_A_TASK; }

/* Moves some columns of the state of a selective scan on by a row; what its query finds behind it, if there is one. */
INLINE void scan_row(float *state, const SelectiveScan *s, int64_t first, int64_t n, const float *key, const vec *value,
                     const vec *steps, const float *query, vec *sums) {
    vec added[VECTORS];
    for (int j = 0; j < VECTORS; j++) added[j] = mul(value[j], steps[j]), sums[j] = all(0.0f);
    for (int64_t i = 0; i < s->size; i++) {
        const vec entry = all(key[i]), asked = all(query ? query[i] : 0.0f);
        vec rates[VECTORS];
        load_values(rates, s->rates + i * s->values + first, n);
        for (int j = 0; j < VECTORS; j++) {
            float *at = state + i * VALUES_A_TASK + j * LANES;
            const vec left = fma3(entry, added[j], mul(load(at), exponential(mul(steps[j], rates[j]))));
            store(at, left);
            if (query) sums[j] = fma3(left, asked, sums[j]);
        }
    }
}

/* Some columns of the state of a selective scan, [size, VALUES_A_TASK] of which `state` has room for. */
static void scan_task(const SelectiveScan *s, const Pass *pass, int64_t task, RowsOf x, RowsOf times, RowsOf kq, RowsOf to,
                      float *state) {
    const int64_t blocks = blocks_of_scan(s), first = task % blocks * VALUES_A_TASK, width = s->size + 2 * s->values;
    const int64_t n = s->values - first < VALUES_A_TASK ? s->values - first : VALUES_A_TASK;
    const Span span = pass->span[task / blocks];
    float *kept = (float *)s->kept + span.slot * s->ring * width + first;
    float *stored = (float *)s->state + span.slot * s->size * s->values + first;
    vec value[VECTORS], steps[VECTORS], sums[VECTORS];
    memset(state, 0, sizeof(float) * s->size * VALUES_A_TASK);
    if (span.base)
        for (int64_t i = 0; i < s->size; i++) memcpy(state + i * VALUES_A_TASK, stored + i * s->values, sizeof(float) * n);
    for (int64_t position = span.base; position < span.start; position++) {
        const float *of = kept + position % s->ring * width;
        load_values(value, of + s->size, n), load_values(steps, of + s->size + s->values, n);
        scan_row(state, s, first, n, of - first, value, steps, 0, sums);
    }
    for (int64_t r = 0; r <= span.tokens; r++) {
        const int64_t position = span.start + r, row = span.row + r;
        if (position == span.certain)
            for (int64_t i = 0; i < s->size; i++)
                memcpy(stored + i * s->values, state + i * VALUES_A_TASK, sizeof(float) * n);
        if (r == span.tokens) break;
        const float *own = x.at + row * x.apart + first, *key = kq.at + row * kq.apart;
        float *of = to.at + row * to.apart + first;
        vec bias[VECTORS], skip[VECTORS];
        load_values(value, own, n), load_values(steps, times.at + row * times.apart + first, n);
        load_values(bias, s->bias + first, n), load_values(skip, s->skip + first, n);
        for (int j = 0; j < VECTORS; j++) steps[j] = softplus_of(add(steps[j], bias[j]));
        scan_row(state, s, first, n, key, value, steps, key + s->size, sums);
        for (int j = 0; j < VECTORS && j * LANES < n; j++)
            store_some(of + j * LANES, fma3(value[j], skip[j], sums[j]), n - j * LANES);
        if (position < span.certain) continue;
        float *left = kept + position % s->ring * width;
        if (!first) memcpy(left, key, sizeof(float) * s->size);
        memcpy(left + s->size, own, sizeof(float) * n);
        for (int j = 0; j < VECTORS && j * LANES < n; j++)
            store_some(left + s->size + s->values + j * LANES, steps[j], n - j * LANES);
    }
}

/* Some columns of the state of a head. */
static void recurrence_task(const Recurrence *s, const Pass *pass, int64_t task, RecurrenceMemory at) {
    const int64_t blocks = blocks_of_values(s), first = task % blocks * VALUES_A_TASK, head = task / blocks % s->heads;
    const int64_t n = s->values - first < VALUES_A_TASK ? s->values - first : VALUES_A_TASK;
    const int64_t share = s->heads / s->key_heads, keys = s->key_heads * s->size, values = s->heads * s->values;
    const int64_t own_key = head / share * s->size, own_value = head * s->values + first, width = keys + values + 2 * s->heads;
    const Span span = pass->span[task / blocks / s->heads];
    float *kept = s->kept + span.slot * s->ring * width;
    float *stored = s->state + (span.slot * s->heads + head) * s->size * s->values + first;
    memset(at.state, 0, sizeof(float) * s->size * VALUES_A_TASK);
    if (span.base)
        for (int64_t i = 0; i < s->size; i++)
            memcpy(at.state + i * VALUES_A_TASK, stored + i * s->values, sizeof(float) * n);
    Added row;
    for (int64_t position = span.base; position < span.start; position++) {
        const float *of = kept + position % s->ring * width, *gates = of + keys + values;
        row.key = of + own_key, row.decay = gates[head], row.strength = gates[s->heads + head];
        load_values(row.value, of + keys + own_value, n);
        move_on(at.state, s, &row);
    }
    for (int64_t r = 0; r <= span.tokens; r++) {
        const int64_t position = span.start + r;
        if (position == span.certain)
            for (int64_t i = 0; i < s->size; i++)
                memcpy(stored + i * s->values, at.state + i * VALUES_A_TASK, sizeof(float) * n);
        if (r == span.tokens) break;
        const float *x = at.qkv.at + (span.row + r) * at.qkv.apart, *value = x + 2 * keys + own_value;
        const float decay = at.decay.at[(span.row + r) * at.decay.apart + head];
        gates_of(s, head, decay, at.strength.at[(span.row + r) * at.strength.apart + head], &row);
        row.key = x + keys + own_key;
        load_values(row.value, value, n);
        compute_row(at.state, s, head, &row, x + own_key, at.to.at + (span.row + r) * at.to.apart + own_value, n);
        if (position < span.certain) continue;
        float *to = kept + position % s->ring * width, *gates = to + keys + values;
        memcpy(to + keys + own_value, value, sizeof(float) * n);
        if (first) continue;
        gates[head] = row.decay, gates[s->heads + head] = row.strength;
        if (head % share == 0) memcpy(to + own_key, row.key, sizeof(float) * s->size);
    }
}

#endif
