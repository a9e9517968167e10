/* Sampling: the entries of a row that can have the two best scores.
 *
 * Nothing here decides by a sum that could have been rounded in another way: shares of the probability are whole numbers,
 * and the caller, choosing.py, gets the few entries that can have the best two scores, for the scores to be computed as
 * everywhere. Vector types are those of GCC and Clang. */

#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "lanes.h"
#include "logits.h"
#include "pool.h"

#define BUCKETS 1024 /* parts of a range of logits */
#define HIGHEST 37.0 /* no noise is above 36.8 */
#define LN2 0x1.62e42fefa39efp-1

typedef double doubles __attribute__((vector_size(64)));
typedef int64_t integers __attribute__((vector_size(64)));
typedef float floats __attribute__((vector_size(32), aligned(4), may_alias));

/* Shares of SIDE entries: e^((x - peak) / temperature) in float32, in whole units of 2^-40. Sums of them are exact. */
static void weigh(const float *x, float peak, float inverse, int64_t *shares) {
    for (int l = 0; l < SIDE; l += LANES) {
        float e[LANES];
        store(e, exponential(mul(sub(load(x + l), all(peak)), all(inverse))));
        for (int i = 0; i < LANES; i += 8) {
            doubles d = __builtin_convertvector(*(const floats *)(e + i), doubles) * 0x1p40 + 0x1.8p52;
            integers whole = (integers)d - 0x4338000000000000; /* the bits of 1.5 * 2^52, adding which has rounded */
            memcpy(shares + l + i, &whole, sizeof whole);
        }
    }
}

/* Where the best entries end: with the `ties`th of those that are `last`. */
typedef struct {
    float last;
    int64_t ties;
} Edge;

/* A range of logits, cut into buckets: the larger the entry, the lower its bucket. */
typedef struct {
    float high, low, scale, up; /* up: what keeps the scale of a narrow range finite */
} Range;

static Range range_of(const float *x, int64_t n, float lowest) {
    float tops[SIDE], lows[SIDE], high = -INFINITY, low = INFINITY;
    for (int l = 0; l < SIDE; l++) tops[l] = high, lows[l] = low;
    int64_t j = 0;
    for (; j + SIDE <= n; j += SIDE)
        for (int l = 0; l < SIDE; l++) {
            tops[l] = x[j + l] > tops[l] ? x[j + l] : tops[l];
            lows[l] = x[j + l] < lows[l] ? x[j + l] : lows[l];
        }
    for (int l = 0; j < n; j++, l++) {
        tops[l] = x[j] > tops[l] ? x[j] : tops[l];
        lows[l] = x[j] < lows[l] ? x[j] : lows[l];
    }
    for (int l = 0; l < SIDE; l++) {
        high = tops[l] > high ? tops[l] : high;
        low = lows[l] < low ? lows[l] : low;
    }
    const double span = (double)high - (low > lowest ? low : lowest);
    const float up = span < 0x1p-60 ? 0x1p100f : 1;
    return (Range){high, low, span > 0 ? (float)((BUCKETS - 1) / (span * up)) : FLT_MAX, up};
}

static inline int32_t bucket(Range range, float x) {
    float at = (range.high - x) * range.up * range.scale;
    return at < BUCKETS - 1 ? (int32_t)at : BUCKETS - 1;
}

/* Copies the entries of a bucket; `part` may be x itself. Returns how many they are. */
static int64_t take(const float *x, int64_t n, Range range, int32_t at, float *part) {
    int64_t taken = 0;
    for (int64_t j = 0; j < n; j += SIDE) {
        int some = n - j < SIDE ? n - j : SIDE;
        int32_t place[SIDE], any = 0;
        for (int l = 0; l < some; l++) {
            place[l] = bucket(range, x[j + l]);
            any |= place[l] == at;
        }
        if (any)
            for (int l = 0; l < some; l++)
                if (place[l] == at) part[taken++] = x[j + l];
    }
    return taken;
}

/* The edge of the fewest of the best entries that have together at least top_p of all shares, or, if inverse is 0, of
 * the `target` best. The range of the entries is cut into buckets, then the bucket in which the edge is, and so on.
 * Returns 0 where there is no memory. */
static int find_edge(const float *x, int64_t n, float peak, float inverse, double top_p, int64_t target, Edge *edge) {
    int64_t before = 0, shares[SIDE];
    float tail[SIDE] = {0};
    int64_t(*sums)[2] = malloc(BUCKETS * sizeof *sums); /* of every other entry: two in turn need not wait */
    float *own = malloc(n * sizeof *own);
    const int found = sums && own;
    for (int l = 0; l < SIDE; l++) shares[l] = 1;
    for (int level = 0; found; level++) {
        Range range = range_of(x, n, level || inverse == 0 ? -FLT_MAX : peak - 30 / inverse);
        if (level && range.high == range.low) break;
        memset(sums, 0, BUCKETS * sizeof *sums);
        for (int64_t j = 0; j < n; j += SIDE) {
            const float *side = x + j;
            int some = n - j < SIDE ? n - j : SIDE;
            int32_t place[SIDE];
            if (some < SIDE) side = memcpy(tail, side, some * sizeof *side);
            if (inverse != 0) weigh(side, peak, inverse, shares);
            for (int l = 0; l < SIDE; l++) place[l] = bucket(range, side[l]);
            for (int l = 0; l < some; l++) sums[place[l]][l & 1] += shares[l];
        }
        if (!level && inverse != 0) {
            int64_t total = 0;
            for (int i = 0; i < BUCKETS; i++) total += sums[i][0] + sums[i][1];
            const double limit = top_p * (double)total;
            target = (int64_t)limit + ((double)(int64_t)limit < limit);
            if (target < 1) target = 1;
        }
        int at = 0;
        while (before + sums[at][0] + sums[at][1] < target) before += sums[at][0] + sums[at][1], at++;
        n = take(x, n, range, at, own);
        x = own;
    }
    if (found) { /* all that is left is equal */
        if (inverse != 0) {
            for (int l = 0; l < SIDE; l++) tail[l] = *x;
            weigh(tail, peak, inverse, shares);
        }
        edge->last = *x;
        edge->ties = (target - before + shares[0] - 1) / shares[0];
    }
    free(own);
    free(sums);
    return found;
}

/* Copies the best entries of a row, as the edge says. */
static void take_best(const float *x, int64_t n, Edge edge, float *part) {
    int64_t taken = 0;
    for (int64_t j = 0; j < n; j += SIDE) {
        int some = n - j < SIDE ? n - j : SIDE;
        int32_t any = 0;
        for (int l = 0; l < some; l++) any |= x[j + l] >= edge.last;
        if (any)
            for (int l = 0; l < some; l++)
                if (x[j + l] > edge.last || (x[j + l] == edge.last && edge.ties-- > 0)) part[taken++] = x[j + l];
    }
}

/* Which entries of a row the filters keep: those above the edge's last, and the first of those that equal it. */
static int keep(const float *x, int64_t n, float peak, double temperature, double top_p, int64_t top_k, double floor,
                Edge *edge) {
    const float inverse = (float)(1 / (temperature > 1e-30 ? temperature : 1e-30));
    edge->last = -INFINITY;
    edge->ties = n;
    if (top_k && top_k < n && !find_edge(x, n, peak, 0, 1, top_k, edge)) return 0;
    if (top_p < 1) {
        float *part = NULL;
        if (top_k && top_k < n) {
            if (!(part = malloc(top_k * sizeof *part))) return 0;
            take_best(x, n, *edge, part);
        }
        int found = find_edge(part ? part : x, part ? top_k : n, peak, inverse, top_p, 0, edge);
        free(part);
        if (!found) return 0;
    }
    if (floor > -INFINITY && ((double)edge->last - peak) / temperature < floor) {
        /* the least logit that is above the floor */
        float least = (float)(peak + floor * temperature);
        if (!(least > -FLT_MAX)) least = -FLT_MAX;
        while (least > -FLT_MAX && ((double)least - peak) / temperature >= floor) least = nextafterf(least, -INFINITY);
        while (((double)least - peak) / temperature < floor) least = nextafterf(least, INFINITY);
        edge->last = least;
        edge->ties = n;
    }
    if (edge->last == -INFINITY) { /* what is excluded has no score, if it is kept or not */
        edge->last = -FLT_MAX;
        edge->ties = n;
    }
    return 1;
}

/* Ten rounds of Philox4x64 (Salmon et al., SC 2011) on the counter (block, position, 0, 0). `keys` are those of the
 * rounds. */
static const uint64_t FIRST = 0xD2E7470EE14C6C93u, SECOND = 0xCA5A826395121157u;

static inline void philox(uint64_t block, uint64_t position, const uint64_t keys[20], uint64_t out[4]) {
    uint64_t a = block, b = position, c = 0, d = 0;
    for (int i = 0; i < 10; i++) {
        unsigned __int128 first = (unsigned __int128)FIRST * a, second = (unsigned __int128)SECOND * c;
        a = (uint64_t)(second >> 64) ^ b ^ keys[2 * i];
        b = (uint64_t)second;
        c = (uint64_t)(first >> 64) ^ d ^ keys[2 * i + 1];
        d = (uint64_t)first;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

/* The same of as many blocks as SIDE entries have. */
#ifdef __AVX512F__
static inline __m512i product(__m512i x, uint64_t factor, __m512i *high) {
    __m512i low = _mm512_set1_epi64(0xffffffff), f = _mm512_set1_epi64(factor), g = _mm512_set1_epi64(factor >> 32);
    __m512i y = _mm512_srli_epi64(x, 32), ll = _mm512_mul_epu32(x, f), hh = _mm512_mul_epu32(y, g);
    __m512i hl = _mm512_add_epi64(_mm512_mul_epu32(y, f), _mm512_srli_epi64(ll, 32));
    __m512i lh = _mm512_add_epi64(_mm512_mul_epu32(x, g), _mm512_and_si512(hl, low));
    *high = _mm512_add_epi64(_mm512_add_epi64(hh, _mm512_srli_epi64(hl, 32)), _mm512_srli_epi64(lh, 32));
    return _mm512_or_si512(_mm512_slli_epi64(lh, 32), _mm512_and_si512(ll, low));
}

static void philox_side(uint64_t block, uint64_t position, const uint64_t keys[20], uint64_t out[SIDE]) {
    for (int part = 0; part < SIDE / 32; part++, out += 32) {
        __m512i a = _mm512_add_epi64(_mm512_set1_epi64(block + 8 * part), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
        __m512i b = _mm512_set1_epi64(position), c = _mm512_setzero_si512(), d = c, first, second;
#pragma GCC unroll 10
        for (int i = 0; i < 10; i++) {
            __m512i last = product(a, FIRST, &first), third = product(c, SECOND, &second);
            a = _mm512_xor_si512(_mm512_xor_si512(second, b), _mm512_set1_epi64(keys[2 * i]));
            c = _mm512_xor_si512(_mm512_xor_si512(first, d), _mm512_set1_epi64(keys[2 * i + 1]));
            b = third, d = last;
        }
        /* from word by word to block by block */
        __m512i left = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        __m512i right = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        __m512i ab = _mm512_unpacklo_epi64(a, b), cd = _mm512_unpacklo_epi64(c, d);
        __m512i odd_ab = _mm512_unpackhi_epi64(a, b), odd_cd = _mm512_unpackhi_epi64(c, d);
        __m512i p = _mm512_permutex2var_epi64(ab, left, cd), q = _mm512_permutex2var_epi64(odd_ab, left, odd_cd);
        __m512i r = _mm512_permutex2var_epi64(ab, right, cd), s = _mm512_permutex2var_epi64(odd_ab, right, odd_cd);
        _mm512_storeu_si512(out, _mm512_shuffle_i64x2(p, q, 0x44));
        _mm512_storeu_si512(out + 8, _mm512_shuffle_i64x2(p, q, 0xEE));
        _mm512_storeu_si512(out + 16, _mm512_shuffle_i64x2(r, s, 0x44));
        _mm512_storeu_si512(out + 24, _mm512_shuffle_i64x2(r, s, 0xEE));
    }
}
#else
static void philox_side(uint64_t block, uint64_t position, const uint64_t keys[20], uint64_t out[SIDE]) {
    for (int q = 0; q < SIDE / 4; q++) philox(block + q, position, keys, out + 4 * q);
}
#endif

/* The noise that a random word gives: -log(-log(u)), but for rounding. */
static double noise(uint64_t word) {
    const double u = ((double)(word >> 11) + 0.5) * 0x1p-53;
    return -log(-log(u < 1 - 0x1p-53 ? u : 1 - 0x1p-53));
}

/* The entries of a row that can have the two best scores: whose score is not below the second best, but for rounding.
 * A score is the logit less the largest, over the temperature, plus noise; a bound of it in float32 spares most entries
 * the logarithms. Returns how many there are, or -1 if there is no room for all. */
static int64_t draw(const float *x, int64_t n, float peak, double temperature, Edge edge, uint64_t seed,
                    uint64_t sample, uint64_t position, int64_t *ids, uint64_t *words) {
    uint64_t keys[20], drawn[SIDE];
    double scores[CANDIDATES], first = -INFINITY, second = -INFINITY;
    float limit = -INFINITY, enough = -INFINITY, bounds[SIDE], tail[SIDE];
    float inverse = (float)(1 / (temperature > 1e-3 ? temperature : 1e-3)); /* above this, quotients are finite */
    int64_t count = 0, ties = edge.ties;
    for (int i = 0; i < 10; i++) {
        keys[2 * i] = seed + i * 0x9E3779B97F4A7C15u;
        keys[2 * i + 1] = sample + i * 0xBB67AE8584CAA73Bu;
    }
    for (int l = 0; l < SIDE; l++) tail[l] = -INFINITY;
    for (int64_t j = 0; j < n; j += SIDE) {
        const float *v = x + j;
        if (n - j < SIDE) v = memcpy(tail, v, (n - j) * sizeof *v);
        int32_t wanted = 0, equal = 0;
        for (int l = 0; l < SIDE; l++) {
            bounds[l] = (v[l] - peak) * inverse;
            int32_t may = (v[l] >= edge.last) & (bounds[l] >= limit);
            wanted += may;
            equal += v[l] == edge.last;
            bounds[l] = may ? bounds[l] : NAN;
        }
        if (!wanted) {
            ties -= equal;
            continue;
        }
        if (wanted > SIDE / 4) philox_side(j / 4, position, keys, drawn);
        else for (int q = 0; q < SIDE; q += 4) {
            const float *b = bounds + q;
            if (b[0] == b[0] || b[1] == b[1] || b[2] == b[2] || b[3] == b[3])
                philox((j + q) / 4, position, keys, drawn + q);
            else
                drawn[q] = drawn[q + 1] = drawn[q + 2] = drawn[q + 3] = 0;
        }
        int32_t any = 0;
        for (int l = 0; l < SIDE; l++) {
            /* -log(-log(u)) <= -log(1 - u); the bits of a float, as a number, are a lower bound of its logarithm. */
            union {
                float value;
                int32_t bits;
            } rest = {(float)(int32_t)(~drawn[l] >> 33)};
            bounds[l] += (float)(158 * LN2) - (float)rest.bits * (float)(LN2 * 0x1p-23);
            any |= bounds[l] >= enough;
        }
        if (any) {
            int64_t left = ties;
            for (int l = 0; l < SIDE; l++) {
                int tied = v[l] == edge.last;
                left -= tied;
                if (!(bounds[l] >= enough) || (tied && left < 0)) continue;
                double s = ((double)v[l] - peak) / temperature;
                if (s + HIGHEST < second) continue;
                double score = s + noise(drawn[l]);
                if (score < second - 1e-9 * (1 + fabs(second))) continue;
                if (count == CANDIDATES) {
                    int64_t kept = 0;
                    for (int64_t i = 0; i < count; i++)
                        if (scores[i] >= second - 1e-9 * (1 + fabs(second)))
                            scores[kept] = scores[i], ids[kept] = ids[i], words[kept++] = words[i];
                    if (kept == CANDIDATES) return -1;
                    count = kept;
                }
                scores[count] = score, ids[count] = j + l, words[count++] = drawn[l];
                if (score > first) second = first, first = score;
                else if (score > second) second = score;
                enough = (float)(second - 1e-4 - 1e-6 * fabs(second));
                limit = (float)(second - HIGHEST - 1e-6 * fabs(second));
            }
        }
        ties -= equal;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++)
        if (scores[i] >= second - 1e-9 * (1 + fabs(second))) ids[kept] = ids[i], words[kept++] = words[i];
    return kept;
}

static double temperature_of(const Draws *d, int64_t i) { return d->temperature[i] > 1e-200 ? d->temperature[i] : 1e-200; }

/* The candidates of a row, and its largest entry; returns what `found` tells. */
static int64_t draw_row(const Draws *d, int64_t i, const float *x, uint64_t position, float *peak, int64_t *ids,
                        uint64_t *words) {
    const int64_t n = d->of.vocabulary;
    const double temperature = temperature_of(d, i);
    Edge edge;
    *peak = largest(x, n);
    if (!isfinite(*peak)) return 0;
    if (!keep(x, n, *peak, temperature, d->top_p[i], d->top_k[i], d->floor[i], &edge)) return -1;
    return draw(x, n, *peak, temperature, edge, d->seed[i], d->sample[i], position, ids, words);
}

/* The entry that row `i`, whose logits are `x`, is likely to choose `further` positions on: the one with the best score
 * as the C library's logarithms have it, so rounding may make it another. -1 where it cannot be told. */
int64_t likely(const Draws *d, int64_t i, const float *x, int64_t further) {
    int64_t ids[CANDIDATES], best = -1;
    uint64_t words[CANDIDATES];
    float peak;
    const int64_t found = draw_row(d, i, x, d->position[i] + (uint64_t)further, &peak, ids, words);
    double most = -INFINITY;
    for (int64_t c = 0; c < found; c++) {
        const double score = ((double)x[ids[c]] - peak) / temperature_of(d, i) + noise(words[c]);
        if (score > most) most = score, best = ids[c];
    }
    return best;
}

typedef struct {
    const Draws *draws;
    atomic_int next;
} Drawing;

/* The candidates of one row after the other. */
static void draw_rows(void *of, int thread) {
    Drawing *drawing = of;
    const Draws *d = drawing->draws;
    (void)thread;
    for (int64_t i; (i = atomic_fetch_add(&drawing->next, 1)) < d->of.count;)
        d->found[i] = draw_row(d, i, row_of(&d->of, i), d->position[i], d->peaks + i, d->ids + i * CANDIDATES, d->words + i * CANDIDATES);
}

/* The candidates of sampled rows. */
void draws(const Draws *d) {
    Drawing drawing = {d, 0};
    together(draw_rows, &drawing, (int)d->of.threads);
}
