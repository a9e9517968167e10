/* Attention of one tile, a query row the same bits whatever stands beside it.
 *
 * Sixteen keys stand side by side in a vector. A score is summed over the head's entries, first to last; the weights
 * of a row are summed in sixteen lanes, by key modulo sixteen; a result is summed over the keys, first to last. Masked
 * keys add exact zeros. So no sum knows how many rows or keys the tile has. Plain C with the vector types of GCC and
 * Clang, built for the processor that it is installed on; its caller is compiled.py. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16  /* keys in a vector */
#define CHUNK 64  /* query rows that share a block of transposed keys */
#define SIDE 8    /* query rows whose scores are summed side by side */
#define COLUMNS 4 /* vectors of a result that are summed side by side */

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64)));

/* q is [slots, heads, rows, size], k and v are [slots, keys, heads, size], mask is [slots, rows, keys], out is [slots,
 * rows, heads, values] without gaps. Strides in entries; those of the last axes are 1. */
typedef struct {
    const void *q, *k, *v, *mask;
    void *out;
    int64_t half;    /* entries are bfloat16 instead of float32 */
    int64_t threads; /* torch's count, which another OpenMP than torch's own would not know */
    int64_t slots, heads, rows, keys, size, values;
    int64_t q_slot, q_head, q_row, k_slot, k_key, k_head, v_slot, v_key, v_head, mask_slot, mask_row;
    double scale, softcap; /* a softcap of 0 is none */
} Tile;

/* For the caller to see that it means the same structure. */
int tile_bytes(void) { return sizeof(Tile); }

/* Bits of the widest vectors that this was built for; a processor without them must not run it. */
int vector_bits(void) {
#if defined(__AVX512F__)
    return 512;
#elif defined(__AVX2__)
    return 256;
#else
    return 128;
#endif
}

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

/* keys[d * LANES + lane] = entry d of key at + lane. */
static inline void transpose(const void *k, int64_t at, int64_t stride, int64_t size, int64_t half, float *keys) {
    for (int64_t d = 0; d < size; d += LANES) {
        vec row[LANES];
        for (int i = 0; i < LANES; i++) row[i] = load(k, at + i * stride + d, half);
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

/* Scores of SIDE rows with the LANES keys of a transposed block. */
static inline void score(const float *const q[SIDE], const float *keys, int64_t size, vec to[SIDE]) {
    vec sums[SIDE] = {};
    for (int64_t d = 0; d < size; d++) {
        vec key = *(const vec *)(keys + d * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < SIDE; r++) sums[r] += key * q[r][d];
    }
    memcpy(to, sums, sizeof sums);
}

/* Scores of a row, masked, to weights that are not normalized yet; their sum. */
static inline float weigh(const Tile *t, float *weights, int64_t mask, int64_t first, int64_t last) {
    const float scale = (float)t->scale, softcap = (float)t->softcap;
    vec most = (vec){} - INFINITY;
    for (int64_t j = first; j < last; j += LANES) {
        vec *at = (vec *)(weights + j);
        vec score = *at * scale;
        if (softcap) score = tangent(score / softcap) * softcap;
        vec hide = load(t->mask, mask + j, t->half);
        *at = pick(hide > -INFINITY, score + hide, hide); /* selected, since a masked score may be NaN */
        most = pick(*at > most, *at, most);
    }
    float top = most[0];
    for (int i = 1; i < LANES; i++) top = most[i] > top ? most[i] : top;
    vec total = {};
    for (int64_t j = first; j < last; j += LANES) {
        vec *at = (vec *)(weights + j);
        *at = exponential(*at - top);
        total += *at;
    }
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) total[i] += total[i + step];
    return total[0];
}

/* Weighted sums of `wide` vectors of the values: of two rows at a time, so that their sums do not wait for each other.
 */
static inline __attribute__((always_inline)) void mix_columns(
    const Tile *t, const float *const weights[2], const float totals[2], int64_t v, const int64_t out[2],
    int64_t first, int64_t last, const int wide) {
    vec one[COLUMNS] = {}, other[COLUMNS] = {};
    for (int64_t j = first; j < last; j++)
#pragma GCC unroll 4
        for (int i = 0; i < wide; i++) {
            vec value = load(t->v, v + j * t->v_key + i * LANES, t->half);
            one[i] += value * weights[0][j];
            other[i] += value * weights[1][j];
        }
    for (int i = 0; i < wide; i++) { /* a masked key's zero may turn -0 to 0, so 0 is all there is */
        store(t->out, out[0] + i * LANES, one[i] / totals[0] + 0.0f, t->half);
        store(t->out, out[1] + i * LANES, other[i] / totals[1] + 0.0f, t->half);
    }
}

static void mix(
    const Tile *t, const float *const weights[2], const float totals[2], int64_t v, const int64_t rows[2],
    int64_t first, int64_t last) {
    for (int64_t c = 0; c < t->values;) {
        int64_t out[2] = {rows[0] + c, rows[1] + c};
        if (t->values - c >= COLUMNS * LANES) {
            mix_columns(t, weights, totals, v + c, out, first, last, COLUMNS);
            c += COLUMNS * LANES;
        } else {
            mix_columns(t, weights, totals, v + c, out, first, last, 1);
            c += LANES;
        }
    }
}

/* Whether a row sees any of LANES keys. */
static inline int sees(const Tile *t, int64_t mask) {
    vec x = load(t->mask, mask, t->half);
    ivec seen = x > -INFINITY;
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= seen[i];
    return any;
}

static void attend_chunk(const Tile *t, int64_t slot, int64_t head, int64_t row, float *scratch) {
    int64_t rows = t->rows - row < CHUNK ? t->rows - row : CHUNK, mask = slot * t->mask_slot + row * t->mask_row;
    float *queries = scratch, *keys = queries + CHUNK * t->size, *weights = keys + LANES * t->size;
    int64_t first = t->keys, last = 0; /* what any of the rows sees */
    for (int64_t r = 0; r < rows; r++) {
        int64_t j = 0;
        while (j < first && !sees(t, mask + r * t->mask_row + j)) j += LANES;
        first = j < first ? j : first;
        for (j = t->keys; j > last && !sees(t, mask + r * t->mask_row + j - LANES);) j -= LANES;
        last = j > last ? j : last;
        int64_t from = slot * t->q_slot + head * t->q_head + (row + r) * t->q_row;
        for (int64_t d = 0; d < t->size; d += LANES)
            *(vec *)(queries + r * t->size + d) = load(t->q, from + d, t->half);
    }
    for (int64_t j = first; j < last; j += LANES) {
        transpose(t->k, slot * t->k_slot + j * t->k_key + head * t->k_head, t->k_key, t->size, t->half, keys);
        for (int64_t r = 0; r < rows; r += SIDE) {
            const float *side[SIDE];
            vec sums[SIDE];
            for (int i = 0; i < SIDE; i++) side[i] = queries + (r + i < rows ? r + i : rows - 1) * t->size;
            score(side, keys, t->size, sums);
            for (int i = 0; i < SIDE && r + i < rows; i++) *(vec *)(weights + (r + i) * t->keys + j) = sums[i];
        }
    }
    int64_t v = slot * t->v_slot + head * t->v_head;
    for (int64_t r = 0; r < rows; r += 2) {
        int64_t second = r + 1 < rows ? r + 1 : r;
        const float *pair[2] = {weights + r * t->keys, weights + second * t->keys};
        float totals[2];
        totals[0] = totals[1] = weigh(t, weights + r * t->keys, mask + r * t->mask_row, first, last);
        if (second != r) totals[1] = weigh(t, weights + second * t->keys, mask + second * t->mask_row, first, last);
        int64_t place = (slot * t->rows + row) * t->heads + head;
        int64_t out[2] = {(place + r * t->heads) * t->values, (place + second * t->heads) * t->values};
        mix(t, pair, totals, v, out, first, last);
    }
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
} Rows;

int rows_bytes(void) { return sizeof(Rows); }

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
int store_rows(const Rows *t) {
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

/* 0, or 1 if there is no memory. */
int attend(const Tile *t) {
    int64_t chunks = (t->rows + CHUNK - 1) / CHUNK, tasks = t->slots * t->heads * chunks;
    int failed = 0;
#pragma omp parallel num_threads(t->threads) if (tasks > 1)
    {
        float *scratch = malloc(sizeof(float) * (CHUNK * (t->size + t->keys) + LANES * t->size));
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tasks; i++)
            if (scratch) attend_chunk(t, i / chunks / t->heads, i / chunks % t->heads, i % chunks * CHUNK, scratch);
        free(scratch);
    }
    return failed;
}
