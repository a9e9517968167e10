/* Linear layers that add up as tensor cores do (CORE_STORAGES): of some inputs at a time, the exact products and the sum
 * before them are cut, toward zero, at so many bits below the largest exponent among them, added exactly, and cut to
 * float32. The exponent of a product is the sum of its factors'; that of zero is -126. Weights are stored as those of
 * pairs, and inputs rounded likewise, but to 16 bits in all builds.
 *
 * Vectors run over the columns. What is cut are whole numbers, below 2^27 each, and their sum of 32 bits and a sign is made
 * in float64. Where an exponent is too large for that, or a number is not finite, columns are computed one by one. */

#ifndef DETGEN_CORES
#define DETGEN_CORES

#include "pairs.h"

#define MOST_AT_ONCE 16 /* inputs */
#define HIGHEST 100     /* exponent for which scales, and products times them, are numbers of float32 */
#define NOT_FINITE 1000 /* is added to an exponent */
#define TO_24_BITS 0xffffffffe0000000u /* of a float64 */
#define BESIDE (PANEL / WIDTH < 4 ? PANEL / WIDTH : 4) /* registers of columns */

#if WIDTH == 16
INLINE sums_reg reg_cut(reg x) { return _mm512_cvttps_epi32(x); }
INLINE sums_reg reg_sum(sums_reg a, sums_reg b) { return _mm512_add_epi32(a, b); }
#elif WIDTH == 8
INLINE sums_reg reg_cut(reg x) { return _mm256_cvttps_epi32(x); }
INLINE sums_reg reg_sum(sums_reg a, sums_reg b) { return _mm256_add_epi32(a, b); }
#else
INLINE sums_reg reg_cut(reg x) { return __builtin_convertvector(x, sums_reg); }
INLINE sums_reg reg_sum(sums_reg a, sums_reg b) { return a + b; }
#endif

INLINE float exponent_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const int32_t field = (int32_t)(bits >> 23 & 255); /* without branches, which compilers make no vectors of */
    return (float)(field - 127 + (field == 0) + (field == 255) * NOT_FINITE);
}

/* What some inputs, of one row, and the weights of one column, PANEL apart, make of a sum; any numbers. */
static float core_sum(int bits, int64_t count, const float *w, const float *x, float sum) {
    double plain = sum;
    int top = (int)exponent_of(sum);
    for (int64_t i = 0; i < count; i++) {
        const int own = (int)(exponent_of(x[i]) + exponent_of(w[i * PANEL]));
        plain += (double)x[i] * w[i * PANEL];
        top = own > top ? own : top;
    }
    if (!(__builtin_fabs(plain) < INFINITY)) return (float)plain; /* one of them is not finite */
    double all = trunc(ldexp(sum, bits - top));
    for (int64_t i = 0; i < count; i++) all += trunc(ldexp((double)x[i] * w[i * PANEL], bits - top));
    uint64_t word;
    memcpy(&word, &all, sizeof word);
    word &= TO_24_BITS;
    memcpy(&all, &word, sizeof word);
    return (float)(ldexp(all, top - bits) + 0.0); /* no -0 */
}

/* The sums of a row in a panel, with some inputs more: w and the exponents e are [count, PANEL]. */
INLINE void core_block(
    const int bits, int64_t count, const float *w, const float *e, const uint16_t *x, float *sums) {
    float at[MOST_AT_ONCE], of[MOST_AT_ONCE], tops[PANEL], back[PANEL];
    int32_t all[PANEL], before[PANEL], beyond = 0;
    for (int64_t i = 0; i < count; i++) at[i] = as_float((uint32_t)x[i] << 16), of[i] = exponent_of(at[i]);
    for (int c = 0; c < PANEL; c++) {
        const float own = exponent_of(sums[c]), least = bits - 124; /* products and sums are multiples of 2^-124 */
        tops[c] = own > least ? own : least;
    }
#define EACH _Pragma("GCC unroll 4") for (int r = 0; r < BESIDE; r++)
    for (int c = 0; c < PANEL; c += BESIDE * WIDTH) {
        reg top[BESIDE];
        EACH top[r] = reg_load(tops + c + r * WIDTH);
        for (int64_t i = 0; i < count; i++) {
            const reg own = reg_all(of[i]);
            EACH top[r] = reg_more(reg_load(e + i * PANEL + c + r * WIDTH) + own, top[r]);
        }
        EACH reg_store(tops + c + r * WIDTH, top[r]);
    }
    for (int c = 0; c < PANEL; c++) beyond |= tops[c] > HIGHEST;
    if (beyond) {
        for (int c = 0; c < PANEL; c++) sums[c] = core_sum(bits, count, w + c, at, sums[c]);
        return;
    }
    for (int c = 0; c < PANEL; c += BESIDE * WIDTH) {
        reg scale[BESIDE];
        sums_reg some[BESIDE];
        EACH {
            const reg top = reg_load(tops + c + r * WIDTH);
            scale[r] = reg_shifted(reg_all(bits) - top), some[r] = sums_all(0);
            reg_store(back + c + r * WIDTH, reg_shifted(top - reg_all(bits)));
        }
        for (int64_t i = 0; i < count; i++) {
            const reg own = reg_all(at[i]);
            EACH some[r] = reg_sum(some[r], reg_cut(reg_load(w + i * PANEL + c + r * WIDTH) * own * scale[r]));
        }
        EACH {
            const sums_reg own = reg_cut(reg_load(sums + c + r * WIDTH) * scale[r]);
            memcpy(all + c + r * WIDTH, &some[r], sizeof own);
            memcpy(before + c + r * WIDTH, &own, sizeof own);
        }
    }
#undef EACH
    for (int c = 0; c < PANEL; c++) {
        double sum = (double)all[c] + (double)before[c];
        uint64_t word;
        memcpy(&word, &sum, sizeof word);
        word &= TO_24_BITS;
        memcpy(&sum, &word, sizeof word);
        sums[c] = (float)sum * back[c];
    }
}

/* One part of the inputs of one panel, for a block of rows, whose inputs are `x_row` floats apart. */
INLINE void core_part(
    const int bits, const int at_once, const char *panel, const float *x, int64_t x_row, int64_t rows, int64_t inputs,
    float *sums, int64_t sums_row, int64_t add_to) {
    float part[rows][PANEL], w[MOST_AT_ONCE][PANEL], e[MOST_AT_ONCE][PANEL];
    memset(part, 0, sizeof part);
    for (int64_t first = 0; first < inputs; first += at_once) {
        const int64_t count = inputs - first < at_once ? inputs - first : at_once;
        for (int64_t i = 0; i < count; i++) {
            uint32_t words[PANEL];
            memcpy(words, panel + (first + i) / 2 * sizeof words, sizeof words);
            for (int c = 0; c < PANEL; c++) w[i][c] = as_float(i % 2 ? words[c] & 0xffff0000 : words[c] << 16);
            for (int c = 0; c < PANEL; c++) e[i][c] = exponent_of(w[i][c]);
        }
        for (int64_t r = 0; r < rows; r++)
            core_block(bits, count, w[0], e[0], (const uint16_t *)(x + r * x_row) + first, part[r]);
    }
    for (int64_t r = 0; r < rows; r++, sums += sums_row)
        for (int c = 0; c < PANEL; c += LANES) {
            const vec found = load(part[r] + c);
            store(sums + c, add_to ? add(load(sums + c), found) : found);
        }
}

#endif
