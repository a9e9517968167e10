/* Sixteen floats side by side, on whatever the processor has: one register of AVX-512, two of AVX2, four of ARM64 or of
 * plain C. Every function here is defined for each lane by itself and by operations of IEEE 754, so all builds give the
 * same bits; docs/numerics.md states them. The compiler contracts nothing (-ffp-contract=off): a fused multiply-add is
 * one that is written. */

#ifndef DETGEN_LANES
#define DETGEN_LANES

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include <immintrin.h>
#define WIDTH 16
typedef __m512 reg;
typedef __m512i ireg;
INLINE reg reg_load(const float *x) { return _mm512_loadu_ps(x); }
INLINE void reg_store(float *to, reg x) { _mm512_storeu_ps(to, x); }
INLINE reg reg_all(float x) { return _mm512_set1_ps(x); }
INLINE reg reg_fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
INLINE reg reg_sqrt(reg a) { return _mm512_sqrt_ps(a); }
/* Lanes of a where a > b, else of y. */
INLINE reg reg_where_more(reg a, reg b, reg x, reg y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
}
INLINE reg reg_more(reg a, reg b) { return _mm512_max_ps(a, b); } /* a where a > b, else b */
INLINE uint32_t reg_equal(reg a, reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); } /* a bit a lane */
INLINE reg reg_shifted(reg x) { /* 2^n for whole n from -126 to 127 */
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvttps_epi32(x), _mm512_set1_epi32(127)), 23));
}
INLINE reg reg_bits(reg a, reg keep, reg set) { /* (a & keep) | set */
    return _mm512_castsi512_ps(
        _mm512_or_si512(_mm512_and_si512(_mm512_castps_si512(a), _mm512_castps_si512(keep)), _mm512_castps_si512(set)));
}
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define WIDTH 8
typedef __m256 reg;
INLINE reg reg_load(const float *x) { return _mm256_loadu_ps(x); }
INLINE void reg_store(float *to, reg x) { _mm256_storeu_ps(to, x); }
INLINE reg reg_all(float x) { return _mm256_set1_ps(x); }
INLINE reg reg_fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
INLINE reg reg_sqrt(reg a) { return _mm256_sqrt_ps(a); }
INLINE reg reg_where_more(reg a, reg b, reg x, reg y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
INLINE reg reg_more(reg a, reg b) { return _mm256_max_ps(a, b); }
INLINE uint32_t reg_equal(reg a, reg b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
INLINE reg reg_shifted(reg x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvttps_epi32(x), _mm256_set1_epi32(127)), 23));
}
INLINE reg reg_bits(reg a, reg keep, reg set) { return _mm256_or_ps(_mm256_and_ps(a, keep), set); }
#else
#define WIDTH 4
typedef float reg __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t ireg __attribute__((vector_size(16), aligned(4), may_alias));
#define LANE for (int l = 0; l < WIDTH; l++)
INLINE reg reg_load(const float *x) { return *(const reg *)x; }
INLINE void reg_store(float *to, reg x) { *(reg *)to = x; }
INLINE reg reg_all(float x) { return (reg){x, x, x, x}; }
#if defined(__aarch64__)
#include <arm_neon.h>
INLINE reg reg_fma(reg a, reg b, reg c) { return (reg)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE reg reg_sqrt(reg a) { return (reg)vsqrtq_f32((float32x4_t)a); }
#else
INLINE reg reg_fma(reg a, reg b, reg c) {
    LANE c[l] = __builtin_fmaf(a[l], b[l], c[l]);
    return c;
}
INLINE reg reg_sqrt(reg a) {
    LANE a[l] = __builtin_sqrtf(a[l]);
    return a;
}
#endif
INLINE reg reg_where_more(reg a, reg b, reg x, reg y) {
    ireg more = a > b;
    return (reg)((more & (ireg)x) | (~more & (ireg)y));
}
INLINE reg reg_more(reg a, reg b) { return reg_where_more(a, b, a, b); }
INLINE uint32_t reg_equal(reg a, reg b) {
    uint32_t found = 0;
    LANE found |= (uint32_t)(a[l] == b[l]) << l;
    return found;
}
INLINE reg reg_shifted(reg x) { return (reg)((__builtin_convertvector(x, ireg) + 127) << 23); }
INLINE reg reg_bits(reg a, reg keep, reg set) { return (reg)(((ireg)a & (ireg)keep) | (ireg)set); }
#endif

#define PARTS (LANES / WIDTH)
#define PART for (int p = 0; p < PARTS; p++)

typedef struct {
    reg r[PARTS];
} vec;

INLINE vec load(const float *x) {
    vec v;
    PART v.r[p] = reg_load(x + p * WIDTH);
    return v;
}
INLINE void store(float *to, vec v) { PART reg_store(to + p * WIDTH, v.r[p]); }
INLINE vec all(float x) {
    vec v;
    PART v.r[p] = reg_all(x);
    return v;
}
INLINE vec add(vec a, vec b) {
    PART a.r[p] = a.r[p] + b.r[p];
    return a;
}
INLINE vec sub(vec a, vec b) {
    PART a.r[p] = a.r[p] - b.r[p];
    return a;
}
INLINE vec mul(vec a, vec b) {
    PART a.r[p] = a.r[p] * b.r[p];
    return a;
}
INLINE vec quotient(vec a, vec b) {
    PART a.r[p] = a.r[p] / b.r[p];
    return a;
}
INLINE vec root(vec a) {
    PART a.r[p] = reg_sqrt(a.r[p]);
    return a;
}
/* a * b + c with one rounding. */
INLINE vec fma3(vec a, vec b, vec c) {
    PART a.r[p] = reg_fma(a.r[p], b.r[p], c.r[p]);
    return a;
}
/* x where a > b, else y, also where one of them is no number. */
INLINE vec where_more(vec a, vec b, vec x, vec y) {
    PART a.r[p] = reg_where_more(a.r[p], b.r[p], x.r[p], y.r[p]);
    return a;
}
/* a where a > b, else b. */
INLINE vec more_of(vec a, vec b) {
    PART a.r[p] = reg_more(a.r[p], b.r[p]);
    return a;
}
/* The first lane in which both are equal; LANES if there is none. */
INLINE int first_equal(vec a, vec b) {
    uint32_t found = 0;
    PART found |= reg_equal(a.r[p], b.r[p]) << (p * WIDTH);
    return found ? __builtin_ctz(found) : LANES;
}
INLINE float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE vec magnitude(vec x) {
    PART x.r[p] = reg_bits(x.r[p], reg_all(as_float(0x7fffffff)), reg_all(0.0f));
    return x;
}
/* a, which is not negative, with the sign of b. */
INLINE vec signed_as(vec a, vec b) {
    PART a.r[p] = reg_bits(b.r[p], reg_all(-0.0f), a.r[p]);
    return a;
}

/* The first n of sixteen floats, zeros behind them. */
INLINE vec load_some(const float *x, int64_t n) {
    if (n >= LANES) return load(x);
    float all[LANES] = {0};
    memcpy(all, x, sizeof(float) * n);
    return load(all);
}
INLINE void store_some(float *to, vec v, int64_t n) {
    if (n >= LANES) {
        store(to, v);
        return;
    }
    float all[LANES];
    store(all, v);
    memcpy(to, all, sizeof(float) * n);
}

/* The sum of the lanes: those eight apart, then four, two and one. */
INLINE float fold(vec v) {
#if WIDTH >= 8
#if WIDTH == 16
    const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v.r[0]), 1));
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v.r[0]), upper);
#else
    const __m256 eight = _mm256_add_ps(v.r[0], v.r[1]);
#endif
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float x[LANES];
    store(x, v);
    for (int step = LANES / 2; step; step /= 2)
        for (int l = 0; l < step; l++) x[l] += x[l + step];
    return x[0];
#endif
}

/* A sum over a row: each block of SUM_BLOCK entries in sixteen lanes, folded, then the blocks likewise. */
typedef struct {
    vec lanes;          /* of whole sixteens of blocks */
    float blocks[LANES]; /* those behind them */
    int count;
} RowSum;

INLINE RowSum no_sum(void) { return (RowSum){.lanes = all(0.0f)}; }
INLINE void add_block(RowSum *sum, vec block) {
    sum->blocks[sum->count++] = fold(block);
    if (sum->count == LANES) sum->lanes = add(sum->lanes, load(sum->blocks)), sum->count = 0;
}
INLINE float sum_of(const RowSum *sum) {
    return fold(sum->count ? add(sum->lanes, load_some(sum->blocks, sum->count)) : sum->lanes);
}
/* The largest lane of numbers. */
INLINE float most_of(vec v) {
#if WIDTH == 16
    return _mm512_reduce_max_ps(v.r[0]);
#elif WIDTH == 8
    const __m256 eight = _mm256_max_ps(v.r[0], v.r[1]);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    float x[LANES], most = -INFINITY;
    store(x, v);
    for (int l = 0; l < LANES; l++) most = x[l] > most ? x[l] : most;
    return most;
#endif
}

/* e^x for x <= 88, to about one unit in the last place; 0 below -87. Cody and Waite's reduction by ln 2 in two parts, and the
 * polynomial of Cephes' expf (Moshier, Methods and Programs for Mathematical Functions, 1989). */
INLINE vec exponential(vec x) {
    const vec low = all(-87.0f), magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    vec inside = more_of(low, x);
    vec n = sub(fma3(inside, all(1.44269504f), magic), magic);
    vec r = fma3(n, all(-0.693359375f), inside);
    r = fma3(n, all(2.12194440e-4f), r);
    vec p = all(1.9875691500e-4f);
    p = fma3(p, r, all(1.3981999507e-3f));
    p = fma3(p, r, all(8.3334519073e-3f));
    p = fma3(p, r, all(4.1665795894e-2f));
    p = fma3(p, r, all(1.6666665459e-1f));
    p = fma3(p, r, all(5.0000001201e-1f));
    p = add(fma3(mul(p, r), r, r), all(1.0f));
    vec power;
    for (int i = 0; i < PARTS; i++) power.r[i] = reg_shifted(n.r[i]);
    return where_more(low, x, all(0.0f), mul(p, power));
}

/* 1 / (1 + e^-x), from e^-|x|, which cannot overflow. */
INLINE vec sigmoid(vec x) {
    vec e = exponential(signed_as(magnitude(x), all(-0.0f)));
    vec one = all(1.0f);
    return quotient(where_more(all(0.0f), x, e, one), add(one, e));
}

/* tanh x: up to 0.625 x + x^3 P(x^2), the polynomial of Cephes' tanhf; beyond (1 - e) / (1 + e) with e = e^-2|x|. */
INLINE vec tangent(vec x) {
    vec size = magnitude(x), square = mul(x, x), one = all(1.0f);
    vec p = all(-5.70498872745e-3f);
    p = fma3(p, square, all(2.06390887954e-2f));
    p = fma3(p, square, all(-5.37397155531e-2f));
    p = fma3(p, square, all(1.33314422036e-1f));
    p = fma3(p, square, all(-3.33332819422e-1f));
    p = fma3(mul(p, square), x, x);
    vec e = exponential(mul(size, all(-2.0f)));
    return where_more(size, all(0.625f), signed_as(quotient(sub(one, e), add(one, e)), x), p);
}

/* erf x: up to 1 x + x P(x^2), beyond 1 - e^(t R(t)) with t = |x|, at most 4; polynomials fitted for detgen, errors up to
 * 1.1 units in the last place. */
INLINE vec error_function(vec x) {
    vec size = magnitude(x), square = mul(x, x), one = all(1.0f), four = all(4.0f);
    vec p = all(7.853906573e-05f);
    p = fma3(p, square, all(-8.010208257e-04f));
    p = fma3(p, square, all(5.188329611e-03f));
    p = fma3(p, square, all(-2.685381286e-02f));
    p = fma3(p, square, all(1.128358543e-01f));
    p = fma3(p, square, all(-3.761262596e-01f));
    p = fma3(p, square, all(1.283791661e-01f));
    p = fma3(p, x, x);
    vec t = where_more(size, four, four, size), r = all(-1.413368045e-05f);
    r = fma3(r, t, all(3.523305932e-04f));
    r = fma3(r, t, all(-3.764653811e-03f));
    r = fma3(r, t, all(2.402549610e-02f));
    r = fma3(r, t, all(-1.065490916e-01f));
    r = fma3(r, t, all(-6.349583268e-01f));
    r = fma3(r, t, all(-1.128697157e+00f));
    return where_more(size, one, signed_as(sub(one, exponential(mul(r, t))), x), p);
}

#endif
