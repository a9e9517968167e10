/* Steps that compute each row by itself: embeddings, norms, rotations, copies. */

#ifndef DETGEN_ROWWISE
#define DETGEN_ROWWISE

#include "linear.h"
#include "layout.h"

/* The first n of sixteen entries of a table, zeros behind them. */
INLINE vec widened(const char *x, int64_t n, int storage) {
    char some[sizeof(float) * LANES] __attribute__((aligned(64))) = {0};
    if (n < LANES) memcpy(some, x, panel_bytes(storage) / PANEL * n), x = some;
    vec v;
    PART v.r[p] = weights(storage, x, p * WIDTH, 0);
    return v;
}

/* Stores or adds x * factor. */
INLINE void put(const Into *into, float *to, vec x, int64_t n) {
    if (into->factor != 1.0) x = mul(x, all((float)into->factor));
    store_some(to, into->add ? add(load_some(to, n), x) : x, n);
}

/* An entry of a table that is as wide as the row. */
static void embed(const void *table, int64_t storage, int64_t id, const Into *into, float *to) {
    const int64_t n = into->buffer.width, bytes = panel_bytes(storage) / PANEL;
    for (int64_t i = 0; i < n; i += LANES) {
        const char *at = (const char *)table + (id * n + i) * bytes;
        put(into, to + i, id < 0 ? all(id == -1 ? 0.0f : NAN) : widened(at, n - i, storage), n - i);
    }
}

/* The same of a column of a weight in floats. */
static void embed_floats(const Weight *weight, int64_t id, const Into *into, float *to) {
    const int pair = rounding_for(weight->storage) > TO_WHOLE, storage = pair ? BFLOAT : weight->storage;
    const int64_t n = into->buffer.width, bytes = panel_bytes(storage) / PANEL, together = pair ? 2 : 1;
    const char *at = id < 0 ? 0 : (const char *)weight->data + (id / PANEL * n * PANEL + id % PANEL * together) * bytes;
    for (int64_t i = 0; i < n; i += LANES) {
        char some[sizeof(float) * LANES] = {0};
        for (int64_t l = 0; id >= 0 && l < LANES && i + l < n; l++) {
            const int64_t input = i + l;
            memcpy(some + l * bytes, at + (input / together * PANEL * together + input % together) * bytes, bytes);
        }
        put(into, to + i, id < 0 ? all(id == -1 ? 0.0f : NAN) : widened(some, n - i, storage), n - i);
    }
}

/* The same of a column of a weight of whole numbers, which are read as `whole_tile` multiplies them. */
static void embed_column(const Weight *weight, int64_t id, const Into *into, float *to) {
    const int64_t n = into->buffer.width, column = id % PANEL, each = weight->scales.group;
    ScaleFloats room;
    for (int64_t first = 0; first < n; first += SECTION) {
        const int64_t inputs = n - first < SECTION ? n - first : SECTION;
        Stretch s = {0};
        if (id >= 0) s = stretch_of(weight, id / PANEL, first, inputs, &room);
        for (int64_t i = 0; i < inputs; i += LANES) {
            float entries[LANES];
            for (int l = 0; l < LANES; l++) {
                const int64_t at = (i + l) / each * PANEL + column;
                entries[l] = id < 0 ? (id == -1 ? 0.0f : NAN) : (float)whole_at(weight, s.data, column, i + l) * s.scales[at];
                if (s.minima) entries[l] += s.minima[at];
            }
            put(into, to + first + i, load(entries), LANES);
        }
    }
}

#define EACH_BLOCK(first, end, n) \
    for (int64_t first = 0, end; end = (n) - first < SUM_BLOCK ? (n) : first + SUM_BLOCK, first < (n); first = end)

static float sum(const float *x, int64_t n) {
    RowSum total = no_sum();
    EACH_BLOCK(first, end, n) {
        vec block = all(0.0f);
        for (int64_t i = first; i < end; i += LANES) block = add(block, load_some(x + i, n - i));
        add_block(&total, block);
    }
    return sum_of(&total);
}

/* The mean square of n entries, less `mean` if they are centred. */
INLINE float mean_square(const float *x, int64_t n, int64_t centred, vec mean) {
    RowSum squares = no_sum();
    EACH_BLOCK(first, end, n) {
        vec block = all(0.0f);
        for (int64_t i = first; i < end; i += LANES) {
            vec v = load_some(x + i, n - i);
            if (centred) {
                float rest[LANES];
                store(rest, sub(v, mean));
                v = load_some(rest, n - i);
            }
            block = fma3(v, v, block);
        }
        add_block(&squares, block);
    }
    return sum_of(&squares) / (float)n;
}

/* A root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467) or a layer norm (Ba et al., arXiv 1607.06450). */
static void norm(const Norm *s, const float *x, const float *weight, const float *bias, float *to) {
    const int64_t n = s->size;
    const vec mean = all(s->centred ? sum(x, n) / (float)n : 0.0f);
    const float found = mean_square(x, n, s->centred, mean), least = (float)s->least;
    const vec scale = all(1.0f / sqrtf((found < least ? least : found) + (float)s->epsilon));
    for (int64_t i = 0; i < n; i += LANES) {
        vec v = load_some(x + i, n - i);
        if (s->centred) v = sub(v, mean);
        v = mul(v, scale);
        if (bias) v = fma3(v, load_some(weight + i, n - i), load_some(bias + i, n - i));
        else if (weight) v = mul(v, load_some(weight + i, n - i));
        put(&s->to, to + i, v, n - i);
    }
}

/* Rotates a head's first `turned` entries by the angles of its position (Su et al., arXiv 2104.09864). */
static void rotate(const Rotate *s, int64_t position, const float *x, float *to) {
    const int64_t half = s->turned / 2;
    const float *c = s->cosines + position * half, *d = s->sines + position * half;
    if (s->interleaved)
        for (int64_t i = 0; i < half; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            to[2 * i] = __builtin_fmaf(a, c[i], -(b * d[i]));
            to[2 * i + 1] = __builtin_fmaf(b, c[i], a * d[i]);
        }
    else
        for (int64_t i = 0; i < half; i += LANES) {
            int64_t n = half - i;
            vec a = load_some(x + i, n), b = load_some(x + half + i, n);
            vec cosine = load_some(c + i, n), sine = load_some(d + i, n);
            store_some(to + i, fma3(a, cosine, sub(all(-0.0f), mul(b, sine))), n);
            store_some(to + half + i, fma3(b, cosine, mul(a, sine)), n);
        }
    if (to != x) memcpy(to + s->turned, x + s->turned, sizeof(float) * (s->cache.size - s->turned));
}

/* Stores an entry of the cache: bounded, and in bf16 the nearest, of ties the even one. */
INLINE void keep(const int storage, void *to, int64_t at, float x, float most) {
    const float found = x > most ? most : x < -most ? -most : x == x ? x : 0;
    uint32_t bits;
    memcpy(&bits, &found, sizeof bits);
    if (storage == BFLOAT) ((uint16_t *)to)[at] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    else ((float *)to)[at] = found;
}

INLINE void keep_row(const int storage, const Cache *c, int64_t place, const float *k, const float *v, float most) {
    const int64_t page = place / PAGE * c->kv_heads, at = place % PAGE;
    for (int64_t i = 0; i < c->kv_heads * c->size; i++)
        keep(storage, c->keys, (page * c->size + i) * PAGE + at, k[i], most);
    for (int64_t h = 0; h < c->kv_heads && c->kept; h++)
        for (int64_t i = 0; i < c->values; i++)
            keep(storage, c->kept, ((page + h) * PAGE + at) * c->values + i, v[h * c->values + i], most);
}

/* Rotates the queries and keys of a row in place and stores its keys and values; whether all keys are finite. There may be
 * queries alone. */
static int rotate_row(const Rotate *s, const Pass *pass, int64_t row, float *x) {
    const Cache *c = &s->cache;
    const int alone = s->qkv.width == c->heads * c->size;
    const float *k = x + c->heads * c->size, *v = k + c->kv_heads * c->size, most = (float)pass->most;
    int finite = 1;
    if (s->turned)
        for (int64_t h = 0; h < c->heads + (alone ? 0 : c->kv_heads); h++)
            rotate(s, pass->positions[row], x + h * c->size, x + h * c->size);
    if (s->factors)
        for (int64_t i = 0; i < c->heads * c->size; i++) x[i] *= s->factors[pass->positions[row]];
    if (alone) return finite;
    for (int64_t i = 0; i < c->kv_heads * c->size; i++) finite &= k[i] - k[i] == 0;
    if (c->storage == BFLOAT) keep_row(BFLOAT, c, pass->places[row], k, v, most);
    else keep_row(FLOAT, c, pass->places[row], k, v, most);
    return finite;
}

INLINE vec activated(int64_t kind, vec x) {
    vec half = all(0.5f), one = all(1.0f);
    if (kind == SILU) return mul(x, sigmoid(x));
    if (kind == GELU_TANH) {
        vec inner = mul(fma3(mul(mul(x, x), x), all(0.044715f), x), all(0.7978845608f));
        return mul(mul(half, x), add(one, tangent(inner)));
    }
    if (kind == GELU) return mul(mul(half, x), add(one, error_function(mul(x, all(0.7071067812f)))));
    if (kind == RELU || kind == RELU_SQUARED) {
        const vec kept = where_more(x, all(0.0f), x, where_more(all(0.0f), x, all(0.0f), x));
        return kind == RELU ? kept : mul(kept, kept);
    }
    return x;
}

/* A function of each entry of a row. */
static void activate(const Activate *s, const float *x, float *to) {
    const int64_t n = s->x.width;
    for (int64_t i = 0; i < n; i += LANES) {
        vec v = load_some(x + i, n - i);
        if (s->function == SIGMOID) v = sigmoid(v);
        else if (s->function == TANH) v = tangent(v);
        else if (s->function >= ROOT) v = root(v);
        else v = activated(s->function, v);
        if (s->function == RECIPROCAL_ROOT) v = quotient(all(1.0f), v);
        put(&s->to, to + i, v, n - i);
    }
}

/* e^(x - largest) of n entries, divided by their sum. */
static void softmax(const float *x, int64_t n, float *to) {
    float most = -INFINITY;
    for (int64_t i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
    for (int64_t i = 0; i < n; i += LANES)
        store_some(to + i, exponential(sub(load_some(x + i, n - i), all(most))), n - i);
    const vec total = all(sum(to, n));
    for (int64_t i = 0; i < n; i += LANES) store_some(to + i, quotient(load_some(to + i, n - i), total), n - i);
}

/* The statistical top-k of the Spark Transformer (You et al., arXiv 2506.06644): what is beyond so many deviations. */
static void gaussian_top_k(const GaussianTopK *s, const float *x, float *to) {
    const int64_t n = s->x.width;
    const vec mean = all(sum(x, n) / (float)n);
    const vec cut = all(sqrtf(mean_square(x, n, 1, mean)) * (float)s->deviations);
    for (int64_t i = 0; i < n; i += LANES)
        store_some(to + i, activated(RELU, sub(sub(load_some(x + i, n - i), mean), cut)), n - i);
}

/* xIELU of each entry (Huang and Schlag, arXiv 2411.13010, section 3). */
static void xielu(const Xielu *s, const float *x, float *to) {
    const int64_t n = s->x.width;
    const vec least = all((float)s->least), rise = all((float)s->rise), fall = all((float)s->fall);
    for (int64_t i = 0; i < n; i += LANES) {
        const vec v = load_some(x + i, n - i), straight = mul(v, all((float)s->slope));
        const vec half = tangent(mul(where_more(v, least, least, v), all(0.5f)));
        const vec less_one = quotient(add(half, half), sub(all(1.0f), half)); /* e^v - 1, exact near 0 */
        const vec below = fma3(sub(less_one, v), fall, straight);
        store_some(to + i, where_more(v, all(0.0f), fma3(mul(v, rise), v, straight), below), n - i);
    }
}

/* Sums of vectors, each times a coefficient. */
static void mix(const Mix *s, const float *x, const float *coefficients, float *to) {
    const int64_t size = s->size, vectors = s->x.width / size, sums = s->to.buffer.width / size;
    for (int64_t i = 0; i < size; i += LANES) {
        vec v[MOST_MIXED]; /* all are read before one is written */
        for (int64_t k = 0; k < vectors; k++) v[k] = load_some(x + k * size + i, size - i);
        for (int64_t j = 0; j < sums; j++) {
            vec found = all(0.0f);
            for (int64_t k = 0; k < vectors; k++) found = fma3(v[k], all(coefficients[j * vectors + k]), found);
            put(&s->to, to + j * size + i, found, size - i);
        }
    }
}

/* As many entries as the narrower buffer has, which begins somewhere in the wider one. */
static void copy_row(const Copy *s, const float *x, float *to) {
    const int64_t width = s->to.buffer.width, n = width < s->x.width ? width : s->x.width;
    const vec most = all((float)s->bound), least = all(-(float)s->bound);
    if (width > n) to += s->at;
    else x += s->at;
    for (int64_t i = 0; i < n; i += LANES) {
        vec v = load_some(x + i, n - i);
        if (s->factors) v = mul(v, load_some(s->factors + i, n - i));
        if (s->bound) v = where_more(v, most, most, where_more(least, v, least, v));
        put(&s->to, to + i, v, n - i);
    }
}

/* Whether all entries of a row are finite. */
static int watch_row(const Watch *s, const float *x) {
    int finite = 1;
    for (int64_t i = 0; i < s->x.width; i++) finite &= x[i] - x[i] == 0;
    return finite;
}

/* The gates of the first entries from i on, `each` of which share one. */
INLINE vec gates_of_entries(const float *gates, int64_t each, int64_t i, int64_t n) {
    if (each == 1) return load_some(gates + i, n);
    float of[LANES] = {0};
    for (int64_t lane = 0; lane < LANES && lane < n; lane++) of[lane] = gates[(i + lane) / each];
    return load(of);
}

static void gate_row(const Gate *s, const float *x, const float *gates, float *to) {
    const int64_t n = s->to.buffer.width, each = n / s->gates.width;
    for (int64_t i = 0; i < n; i += LANES) {
        const vec gate = each % LANES ? gates_of_entries(gates, each, i, n - i) : all(gates[i / each]);
        const vec opened = s->function == SIGMOID ? sigmoid(gate) : activated(s->function, gate);
        put(&s->to, to + i, mul(load_some(x + s->at + i, n - i), opened), n - i);
    }
}

#endif
