/* Attention of a pass over the pages of a KV cache, a row the same bits whatever stands beside it.
 *
 * Sixteen keys stand side by side in a vector. A score is summed over the head's entries, first to last; the weights
 * of a row are summed in sixteen lanes, by key modulo sixteen; a result is summed over the keys, first to last. Keys
 * that a row does not see would add exact zeros, so it does not matter which of them are left out. So no sum knows of
 * other rows, nor which pages the keys are in. Plain C with the vector types of GCC and Clang, built for the processor
 * that it is installed on; its caller is compiled.py. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "built.h"

#define LANES 16 /* keys in a vector */
#define PAGE 64  /* keys in a page */
#define AHEAD 8  /* keys whose values are asked for before they are used */
/* Vectors of keys, or of a result, that are summed side by side for up to 4 rows: as the registers allow. */
#ifdef __AVX512F__
#define WIDE 4
#else
#define WIDE 1
#endif

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64)));
#define INLINE static inline __attribute__((always_inline))

/* Consecutive tokens of a slot, from position `start` and row `row` of the pass on, that share transposed keys. */
typedef struct {
    int64_t slot, start, tokens, row;
} Piece;

/* q is [rows, heads, size], its strides in entries and that of the last axis 1; k and v are [positions, kv_heads,
 * size] and out is [rows, heads, values], all without gaps. Block b of a slot's keys is page tables[slot, b]. */
typedef struct {
    const void *q, *k, *v;
    void *out;
    const int64_t *tables; /* [slots, blocks] */
    const Piece *pieces;   /* the longest first; their rows are the first ones of the pass, the others are padding */
    int64_t half;          /* entries are bfloat16 instead of float32 */
    int64_t threads;       /* torch's count, which another OpenMP than torch's own would not know */
    int64_t rows, count, blocks, group, kv_heads, size, values, q_row, q_head;
    int64_t window;        /* positions that a row sees, its own included; 0 for all */
    double scale, softcap; /* a softcap of 0 is none */
} Pass;

/* For the caller to see that it means the same structure. */
int pass_bytes(void) { return sizeof(Pass); }

static inline vec pick(ivec where, vec a, vec b) { return (vec)((where & (ivec)a) | (~where & (ivec)b)); }

static inline vec load(const void *from, int64_t at, int64_t half) {
    if (!half) return *(const vec *)((const float *)from + at);
    union {
        uint32_t bits[LANES];
        vec value;
    } wide;
    const uint16_t *entries = (const uint16_t *)from + at;
    for (int i = 0; i < LANES; i++) wide.bits[i] = (uint32_t)entries[i] << 16;
    return wide.value;
}

static inline void store(void *to, int64_t at, vec x, int64_t half) {
    if (!half) {
        *(vec *)((float *)to + at) = x;
        return;
    }
    union {
        vec value;
        uint32_t bits[LANES];
    } wide = {x};
    uint16_t *entries = (uint16_t *)to + at;
    for (int i = 0; i < LANES; i++) {
        uint32_t b = wide.bits[i];
        int nan = (b & 0x7fffffff) > 0x7f800000;
        entries[i] = nan ? 0x7fc0 : (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16); /* to the nearest, ties to even */
    }
}

/* e^x of x <= 0, to 2 units in the last place; 0 below -87. Cody and Waite's reduction, Cephes' polynomial of expf. */
static inline vec exponential(vec x) {
    const vec magic = (vec){} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    vec inside = pick(x < -87.0f, (vec){} - 87.0f, x);
    vec n = (inside * 1.44269504f + magic) - magic;
    vec r = inside - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = (vec){} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union {
        ivec bits;
        vec value;
    } power = {(__builtin_convertvector(n, ivec) + 127) << 23};
    return pick(x < -87.0f, (vec){}, p * power.value);
}

/* tanh x = (1 - e^-2|x|) / (1 + e^-2|x|), with the sign of x. */
static inline vec tangent(vec x) {
    const ivec sign = (ivec){} + INT32_MIN;
    vec e = exponential(-2.0f * (vec)((ivec)x & ~sign));
    return (vec)((ivec)((1.0f - e) / (1.0f + e)) | ((ivec)x & sign));
}

/* Asks for entries ahead of their use: keys and values lie in short rows, which caches do not foresee. */
INLINE void ask(const void *from, int64_t at, int64_t half) {
    __builtin_prefetch((const char *)from + at * (half ? 2 : 4));
}

/* keys[d * LANES + lane] = entry d of key at + lane; asks for the keys from `next` on. */
INLINE void transpose(
    const void *k, int64_t at, int64_t next, int64_t stride, int64_t size, int64_t half, float *keys) {
    for (int64_t d = 0; d < size; d += LANES) {
        vec row[LANES];
        for (int i = 0; i < LANES; i++) row[i] = load(k, at + i * stride + d, half);
        for (int i = 0; i < LANES; i++) ask(k, next + i * stride + d, half);
#ifdef __AVX512F__
        __m512 a[LANES], b[LANES];
        for (int i = 0; i < LANES; i += 2) {
            a[i] = _mm512_unpacklo_ps((__m512)row[i], (__m512)row[i + 1]);
            a[i + 1] = _mm512_unpackhi_ps((__m512)row[i], (__m512)row[i + 1]);
        }
        for (int i = 0; i < LANES; i += 4)
            for (int j = 0; j < 2; j++) {
                b[i + 2 * j] = _mm512_shuffle_ps(a[i + j], a[i + 2 + j], 0x44);
                b[i + 2 * j + 1] = _mm512_shuffle_ps(a[i + j], a[i + 2 + j], 0xee);
            }
        for (int i = 0; i < 4; i++) {
            a[i] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
            a[i + 4] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
            a[i + 8] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
            a[i + 12] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
        }
        for (int i = 0; i < 4; i++) {
            _mm512_storeu_ps(keys + (d + i) * LANES, _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88));
            _mm512_storeu_ps(keys + (d + i + 8) * LANES, _mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd));
            _mm512_storeu_ps(keys + (d + i + 4) * LANES, _mm512_shuffle_f32x4(a[i + 4], a[i + 12], 0x88));
            _mm512_storeu_ps(keys + (d + i + 12) * LANES, _mm512_shuffle_f32x4(a[i + 4], a[i + 12], 0xdd));
        }
#else
        for (int i = 0; i < LANES; i++)
            for (int j = 0; j < LANES; j++) keys[(d + j) * LANES + i] = row[i][j];
#endif
    }
}

/* Scores of `rows` rows, `size` entries each, with `wide` vectors of transposed keys; those of a row `stride` apart. */
INLINE void score(
    const float *q, const float *keys, int64_t size, float *to, int64_t stride, const int rows, const int wide) {
    vec sums[4][4] = {};
    for (int64_t d = 0; d < size; d++)
#pragma GCC unroll 4
        for (int i = 0; i < wide; i++) {
            vec key = *(const vec *)(keys + (i * size + d) * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r][i] += key * q[r * size + d];
        }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < wide; i++) *(vec *)(to + r * stride + i * LANES) = sums[r][i];
}

INLINE void score_page(
    const float *q, const float *keys, int64_t size, int64_t vectors, float *to, int64_t stride, const int rows) {
    int64_t i = 0;
#if WIDE > 1
    for (; i + 4 <= vectors; i += 4) score(q, keys + i * size * LANES, size, to + i * LANES, stride, rows, 4);
    for (; i + 2 <= vectors; i += 2) score(q, keys + i * size * LANES, size, to + i * LANES, stride, rows, 2);
#endif
    for (; i < vectors; i++) score(q, keys + i * size * LANES, size, to + i * LANES, stride, rows, 1);
}

/* Scores of keys first to last - 1 to weights that are not normalized yet, 0 but for keys from `low` to `high` - 1;
 * their sum. */
static float weigh(const Pass *t, float *weights, int64_t first, int64_t last, int64_t low, int64_t high) {
    const float scale = (float)t->scale, softcap = (float)t->softcap;
    const ivec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vec most = (vec){} - INFINITY;
    for (int64_t j = first; j < last; j += LANES) {
        vec *at = (vec *)(weights + j - first);
        vec score = *at * scale;
        if (softcap) score = tangent(score / softcap) * softcap;
        ivec key = lanes + (int32_t)j;
        *at = pick((key >= (int32_t)low) & (key < (int32_t)high), score, (vec){} - INFINITY);
        most = pick(*at > most, *at, most);
    }
    float top = most[0];
    for (int i = 1; i < LANES; i++) top = most[i] > top ? most[i] : top;
    vec total = {};
    for (int64_t j = first; j < last; j += LANES) {
        vec *at = (vec *)(weights + j - first);
        *at = exponential(*at - top);
        total += *at;
    }
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) total[i] += total[i + step];
    return total[0];
}

/* Adds the weighted values of `keys` keys, `v_key` entries apart, to `wide` vectors of the sums of `rows` rows. */
INLINE void mix_columns(
    float *sums, const float *weights, const void *v, int64_t at, int64_t keys, int64_t v_key, int64_t values,
    int64_t stride, int64_t half, const int rows, const int wide) {
    vec all[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < wide; i++) all[r][i] = *(vec *)(sums + r * values + i * LANES);
    for (int64_t j = 0; j < keys; j++) {
        for (int i = 0; i < wide; i++) ask(v, at + (j + AHEAD) * v_key + i * LANES, half);
#pragma GCC unroll 4
        for (int i = 0; i < wide; i++) {
            vec value = load(v, at + j * v_key + i * LANES, half);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) all[r][i] += value * weights[r * stride + j];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < wide; i++) *(vec *)(sums + r * values + i * LANES) = all[r][i];
}

INLINE void mix(
    float *sums, const float *weights, const void *v, int64_t at, int64_t keys, int64_t v_key, int64_t values,
    int64_t stride, int64_t half, const int rows) {
    int64_t c = 0;
#if WIDE > 1
    for (; c + 4 * LANES <= values; c += 4 * LANES)
        mix_columns(sums + c, weights, v, at + c, keys, v_key, values, stride, half, rows, 4);
#endif
    for (; c < values; c += LANES)
        mix_columns(sums + c, weights, v, at + c, keys, v_key, values, stride, half, rows, 1);
}

/* The first key that the row at a position sees. */
INLINE int64_t first_seen(const Pass *t, int64_t position) {
    return t->window && position >= t->window ? position - t->window + 1 : 0;
}

/* Floats of the scores of a row of a piece: of all vectors of keys that any of its rows sees. */
INLINE int64_t span(const Pass *t, const Piece *p) {
    int64_t last = (p->start + p->tokens + LANES - 1) / LANES * LANES;
    return last - first_seen(t, p->start) / LANES * LANES;
}

/* What `step` rows from row r of a piece on see: keys low to high - 1. */
INLINE int64_t seen(const Pass *t, const Piece *p, int64_t r, int64_t step, int64_t *high) {
    *high = p->start + (r + step - 1) / t->group + 1;
    return first_seen(t, p->start + r / t->group);
}

INLINE void attend_piece(const Pass *t, const Piece *p, int64_t head, float *scratch, const int64_t half) {
    const int64_t size = t->size, values = t->values, group = t->group, rows = p->tokens * group, stride = span(t, p);
    const int64_t first = first_seen(t, p->start) / LANES * LANES, last = first + stride;
    const int64_t *table = t->tables + p->slot * t->blocks;
    float *queries = scratch, *keys = queries + rows * size, *sums = keys + PAGE * size;
    float *weights = sums + rows * values, *totals = weights + rows * stride;
    for (int64_t r = 0; r < rows; r++) {
        int64_t from = (p->row + r / group) * t->q_row + (head * group + r % group) * t->q_head;
        for (int64_t d = 0; d < size; d += LANES) *(vec *)(queries + r * size + d) = load(t->q, from + d, half);
    }
    for (int64_t j = first, end; j < last; j = end) {
        end = (j / PAGE + 1) * PAGE < last ? (j / PAGE + 1) * PAGE : last;
        int64_t vectors = (end - j) / LANES, key = table[j / PAGE] * PAGE + j % PAGE, k_key = t->kv_heads * size;
        int64_t ahead = end < last ? table[end / PAGE] * PAGE : key; /* where the keys after these are */
        for (int64_t i = 0; i < vectors; i++) {
            int64_t at = key + i * LANES, next = i + 1 < vectors ? at + LANES : ahead;
            transpose(
                t->k, at * k_key + head * size, next * k_key + head * size, k_key, size, half,
                keys + i * LANES * size);
        }
        float *to = weights + j - first;
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4)
            score_page(queries + r * size, keys, size, vectors, to + r * stride, stride, 4);
        for (; r + 2 <= rows; r += 2)
            score_page(queries + r * size, keys, size, vectors, to + r * stride, stride, 2);
        if (r < rows) score_page(queries + r * size, keys, size, vectors, to + r * stride, stride, 1);
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t all, high, step = r / 4 * 4 + 4 <= rows ? 4 : rows - r / 4 * 4; /* those that are mixed together */
        int64_t from = seen(t, p, r / 4 * 4, step, &all) / LANES * LANES, low = seen(t, p, r, 1, &high);
        totals[r] = weigh(t, weights + r * stride + from - first, from, (all + LANES - 1) / LANES * LANES, low, high);
    }
    memset(sums, 0, sizeof(float) * rows * values);
    for (int64_t j = first, end; j < last; j = end) {
        end = (j / PAGE + 1) * PAGE < last ? (j / PAGE + 1) * PAGE : last;
        int64_t v_key = t->kv_heads * values, page = table[j / PAGE] * PAGE;
        for (int64_t r = 0, step; r < rows; r += step) {
            step = r + 4 <= rows ? 4 : r + 2 <= rows ? 2 : 1;
            int64_t high, low = seen(t, p, r, step, &high);
            low = low > j ? low : j;
            high = high < end ? high : end;
            if (low >= high) continue;
            int64_t at = (page + low % PAGE) * v_key + head * values;
            const float *w = weights + r * stride + low - first;
            float *to = sums + r * values;
            if (step == 4)
                mix(to, w, t->v, at, high - low, v_key, values, stride, half, 4);
            else if (step == 2)
                mix(to, w, t->v, at, high - low, v_key, values, stride, half, 2);
            else
                mix(to, w, t->v, at, high - low, v_key, values, stride, half, 1);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t to = ((p->row + r / group) * t->kv_heads * group + head * group + r % group) * values;
        for (int64_t c = 0; c < values; c += LANES) /* a masked key's zero would turn -0 to 0, so 0 is all there is */
            store(t->out, to + c, *(vec *)(sums + r * values + c) / totals[r] + 0.0f, half);
    }
}

static void attend_float(const Pass *t, const Piece *p, int64_t head, float *scratch) {
    attend_piece(t, p, head, scratch, 0);
}

static void attend_half(const Pass *t, const Piece *p, int64_t head, float *scratch) {
    attend_piece(t, p, head, scratch, 1);
}

/* 0, or 1 if there is no memory. */
int attend(const Pass *t) {
    int64_t tasks = t->count * t->kv_heads, room = 0, used = 0, row = t->kv_heads * t->group * t->values;
    int failed = 0;
    for (int64_t i = 0; i < t->count; i++) {
        int64_t rows = t->pieces[i].tokens * t->group;
        int64_t floats = rows * (t->size + t->values + span(t, t->pieces + i) + 1);
        room = floats > room ? floats : room;
        used += t->pieces[i].tokens;
    }
    room += PAGE * t->size;
    memset((char *)t->out + used * row * (t->half ? 2 : 4), 0, (t->rows - used) * row * (t->half ? 2 : 4));
#pragma omp parallel num_threads(t->threads) if (tasks > 1)
    {
        float *scratch = malloc(sizeof(float) * room);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < tasks; i++)
            if (scratch)
                (t->half ? attend_half : attend_float)(t, t->pieces + i / t->kv_heads, i % t->kv_heads, scratch);
        free(scratch);
    }
    return failed;
}

/* Rows k, [rows, heads, size], and v, [rows, heads, values], to be stored at positions of buffers without gaps. Strides
 * in entries; those of the last axes are 1. */
typedef struct {
    const void *k, *v;
    void *keys, *values_to;
    const int64_t *positions;
    int64_t half, rows, heads, size, values;
    int64_t k_row, k_head, v_row, v_head;
    double most;
} Stored;

int stored_bytes(void) { return sizeof(Stored); }

/* n entries, those beyond the bounds on them and NaN as 0; whether there were any of these. */
static int copy_bounded(const void *from, int64_t at, void *to, int64_t place, int64_t n, int64_t half, float most) {
    int beyond = 0;
    if (half) {
        const uint16_t *x = (const uint16_t *)from + at;
        uint16_t *y = (uint16_t *)to + place;
        for (int64_t i = 0; i < n; i++) {
            union {
                uint32_t bits;
                float value;
            } wide = {(uint32_t)x[i] << 16};
            float kept = wide.value > most ? most : wide.value < -most ? -most : wide.value == wide.value ? wide.value : 0;
            beyond |= !(kept == wide.value);
            wide.value = kept;
            y[i] = (uint16_t)((wide.bits + 0x7fff + ((wide.bits >> 16) & 1)) >> 16); /* to the nearest, ties to even */
        }
    } else {
        const float *x = (const float *)from + at;
        float *y = (float *)to + place;
        for (int64_t i = 0; i < n; i++) {
            float kept = x[i] > most ? most : x[i] < -most ? -most : x[i] == x[i] ? x[i] : 0;
            beyond |= !(kept == x[i]);
            y[i] = kept;
        }
    }
    return beyond;
}

/* Whether an entry had to be bounded. */
int store_rows(const Stored *t) {
    const float most = (float)t->most;
    int beyond = 0;
    for (int64_t r = 0; r < t->rows; r++)
        for (int64_t h = 0; h < t->heads; h++) {
            int64_t place = t->positions[r] * t->heads + h, k = r * t->k_row + h * t->k_head;
            beyond |= copy_bounded(t->k, k, t->keys, place * t->size, t->size, t->half, most);
            int64_t v = r * t->v_row + h * t->v_head;
            beyond |= copy_bounded(t->v, v, t->values_to, place * t->values, t->values, t->half, most);
        }
    return beyond;
}
