/* The best entry of each row, and the log-probability of a chosen one.
 *
 * Log-probabilities take torch's own exponential and logarithm, or the same steps, and its order of summation, so that
 * they have its bits. Plain C for GCC and Clang; its caller is choosing.py. */

#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "built.h"
#include "rows.h"

typedef struct {
    Rows of;
    int64_t *tokens;
    double *leads;
} Best;

/* Exponential and logarithm are SLEEF's expf and logf for vectors of `lanes` entries, 8 or 16. */
typedef struct {
    Rows of;
    const int64_t *tokens; /* by row, not by place in `rows` */
    float *chosen;
    const void *exponential, *logarithm;
    int64_t lanes;
} Judged;

/* For the caller to see that it means the same structures. */
int best_bytes(void) { return sizeof(Best); }
int judged_bytes(void) { return sizeof(Judged); }

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

/* Of each row the largest entry, the first of ties, and its lead over the largest of the others. */
void best(const Best *b) {
#pragma omp parallel for num_threads(b->of.threads) schedule(static) if (b->of.threads > 1)
    for (int64_t i = 0; i < b->of.count; i++) {
        const float *x = row_of(&b->of, i);
        float top, second;
        if (two_largest(x, b->of.vocabulary, &top, &second)) top = NAN;
        b->tokens[i] = first_of(x, b->of.vocabulary, top);
        b->leads[i] = (double)top - (double)second + 0.0;
    }
}

/* The sum of e^(x - largest) in torch's order: of as many lanes as a vector has, these in halves; less than a vector
 * one by one. */
#ifdef __AVX2__
static float sum8(const float *x, int64_t n, float top, __m256 (*exponential)(__m256)) {
    float lanes[8], rest[8];
    __m256 peak = _mm256_set1_ps(top), sum;
    int64_t j = 8;
    if (n < 8) {
        memset(rest, 0, sizeof rest);
        memcpy(rest, x, n * sizeof *x);
        _mm256_storeu_ps(lanes, exponential(_mm256_sub_ps(_mm256_loadu_ps(rest), peak)));
        for (int l = 1; l < n; l++) lanes[0] += lanes[l];
        return lanes[0];
    }
    sum = exponential(_mm256_sub_ps(_mm256_loadu_ps(x), peak));
    for (; j + 8 <= n; j += 8) sum = _mm256_add_ps(sum, exponential(_mm256_sub_ps(_mm256_loadu_ps(x + j), peak)));
    _mm256_storeu_ps(lanes, sum);
    if (j < n) {
        memset(rest, 0, sizeof rest);
        memcpy(rest, x + j, (n - j) * sizeof *x);
        _mm256_storeu_ps(rest, exponential(_mm256_sub_ps(_mm256_loadu_ps(rest), peak)));
        for (int l = 0; j + l < n; l++) lanes[l] += rest[l];
    }
    for (int half = 4; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}
#endif
#ifdef __AVX512F__
/* SLEEF's expf of what is not above 0, step by step (Shibata and Petrogalli, "SLEEF: A portable vectorized library of C
 * standard mathematical functions", 2020): the same bits without the calls. */
static inline __m512 exponential16(__m512 x) {
    static const float terms[] = {0x1.6d2d92p-10f, 0x1.11114cp-7f, 0x1.5554f4p-5f, 0x1.555556p-3f, 0.5f};
    __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(0x1.715476p0f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fmadd_ps(whole, _mm512_set1_ps(-0x1.62e4p-1f), x), p = _mm512_set1_ps(0x1.a057b4p-13f);
    r = _mm512_fmadd_ps(whole, _mm512_set1_ps(-0x1.7f7d1cp-20f), r);
    for (int t = 0; t < 5; t++) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(terms[t]));
    p = _mm512_add_ps(_mm512_set1_ps(1), _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r));
    __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-104), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(some, p, whole);
}

static float sum16(const float *x, int64_t n, float top) {
    float lanes[16];
    __m512 peak = _mm512_set1_ps(top), sum;
    int64_t j = 16;
    if (n < 16) {
        sum = _mm512_maskz_loadu_ps((1u << n) - 1, x);
        _mm512_storeu_ps(lanes, exponential16(_mm512_sub_ps(sum, peak)));
        for (int l = 1; l < n; l++) lanes[0] += lanes[l];
        return lanes[0];
    }
    sum = exponential16(_mm512_sub_ps(_mm512_loadu_ps(x), peak));
    for (; j + 16 <= n; j += 16) sum = _mm512_add_ps(sum, exponential16(_mm512_sub_ps(_mm512_loadu_ps(x + j), peak)));
    if (j < n) {
        __mmask16 some = (1u << (n - j)) - 1;
        __m512 last = exponential16(_mm512_sub_ps(_mm512_maskz_loadu_ps(some, x + j), peak));
        sum = _mm512_mask_add_ps(sum, some, sum, last);
    }
    _mm512_storeu_ps(lanes, sum);
    for (int half = 8; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}
#endif

/* Whether `exponential`, SLEEF's for vectors of `lanes` entries, has the same bits as what `judge` takes, at every
 * step-th number that is not above 0. */
int same_exponential(const void *exponential, int64_t lanes, int64_t step) {
    int same = 1;
#ifdef __AVX512F__
    for (uint32_t bits = 0x80000000u; lanes == 16 && same && bits <= 0xff800000u - 16 * step; bits += 16 * step) {
        __m512i ahead = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        ahead = _mm512_mullo_epi32(ahead, _mm512_set1_epi32(step));
        __m512 x = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_set1_epi32(bits), ahead));
        __m512 one = ((__m512(*)(__m512))exponential)(x), other = exponential16(x);
        same = !_mm512_cmpneq_epi32_mask(_mm512_castps_si512(one), _mm512_castps_si512(other));
    }
#else
    (void)exponential, (void)lanes, (void)step; /* it takes that one */
#endif
    return same;
}

/* The log-probability of each row's token. Returns whether it can: a build for smaller vectors than torch takes cannot,
 * nor can it without memory. */
int judge(const Judged *d) {
    int64_t n = d->of.vocabulary, count = d->of.count;
    float *sums = malloc(2 * (count + 16) * sizeof *sums), *tops = sums + count + 16;
    int able = 0;
#ifdef __AVX2__
    able |= d->lanes == 8;
#endif
#ifdef __AVX512F__
    able |= d->lanes == 16;
#endif
    if (!sums || !able) {
        free(sums);
        return 0;
    }
#pragma omp parallel for num_threads(d->of.threads) schedule(static) if (d->of.threads > 1)
    for (int64_t i = 0; i < count; i++) {
        const float *x = row_of(&d->of, i);
        tops[i] = largest(x, n);
#ifdef __AVX512F__
        if (d->lanes == 16) sums[i] = sum16(x, n, tops[i]);
#endif
#ifdef __AVX2__
        if (d->lanes == 8) sums[i] = sum8(x, n, tops[i], (__m256(*)(__m256))d->exponential);
#endif
    }
    for (int l = 0; l < 16; l++) sums[count + l] = 1;
    for (int64_t i = 0; i < count; i += d->lanes) {
#ifdef __AVX512F__
        if (d->lanes == 16)
            _mm512_storeu_ps(sums + i, ((__m512(*)(__m512))d->logarithm)(_mm512_loadu_ps(sums + i)));
#endif
#ifdef __AVX2__
        if (d->lanes == 8) _mm256_storeu_ps(sums + i, ((__m256(*)(__m256))d->logarithm)(_mm256_loadu_ps(sums + i)));
#endif
    }
    for (int64_t i = 0; i < count; i++)
        d->chosen[i] = row_of(&d->of, i)[d->tokens[d->of.rows ? d->of.rows[i] : i]] - tops[i] - sums[i];
    free(sums);
    return 1;
}
