/* Linear layers of bf16 pairs: two inputs of a column share a word, the even one in its lower half, and inputs are rounded
 * to bf16. Of each pair the odd input comes first, y = fma(x[2i + 1], w[2i + 1], y), then y = fma(x[2i], w[2i], y): what
 * AVX512_BF16 computes of two words. It takes subnormal numbers for zeros, but there are none: what is below SMALLEST is
 * 0, so products and their sums are multiples of SMALLEST^2. */

#ifndef DETGEN_PAIRS
#define DETGEN_PAIRS

#include "whole.h"

#ifdef __AVX512BF16__
#define PAIR_UNIT 2 /* inputs that are multiplied at once */
typedef uint16_t Narrow __attribute__((may_alias)); /* an input: two are read as a word */
#else
#define PAIR_UNIT 1
typedef float Narrow;
#endif

/* How inputs are rounded: not at all, to whole numbers, or to bf16, for pairs or for cores; and the bytes of one. */
enum { NOT_ROUNDED, TO_WHOLE, TO_PAIRS, TO_CORES };
INLINE int rounding_for(int64_t storage) {
    return is_whole(storage) ? TO_WHOLE : storage == PAIR ? TO_PAIRS : is_core(storage) ? TO_CORES : NOT_ROUNDED;
}
INLINE int64_t rounded_bytes(int64_t storage) {
    return storage == PAIR ? sizeof(Narrow) : is_core(storage) ? sizeof(uint16_t) : 1;
}

/* Inputs that are one to a tile, and how many of these it takes in a turn. */
INLINE int64_t unit_of(int storage) { return storage == PAIR ? PAIR_UNIT : is_core(storage) ? 2 : 1; }
INLINE int turn_of(int storage) { return storage == PAIR ? 2 / PAIR_UNIT : 1; }

/* The nearest number of bf16, of ties the even one, and 0 where that is below SMALLEST. NaN stays NaN. */
INLINE float narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t near = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    const float found = x == x ? as_float(near) : NAN;
    return __builtin_fabsf(found) < (float)SMALLEST ? 0.0f : found;
}

/* A row of inputs in bf16, as 16 bits each. */
static void narrow_words(const float *x, int64_t inputs, uint16_t *to) {
    for (int64_t i = 0; i < inputs; i++) {
        const float kept = narrow(x[i]);
        uint32_t bits;
        memcpy(&bits, &kept, sizeof bits);
        to[i] = (uint16_t)(bits >> 16);
    }
}

/* The same for pairs. */
static void narrow_row(const float *x, int64_t inputs, Narrow *to) {
#ifdef __AVX512BF16__
    narrow_words(x, inputs, to);
#else
    for (int64_t i = 0; i < inputs; i++) to[i] = narrow(x[i]);
#endif
}

#ifdef __AVX512BF16__
INLINE reg reg_pairs(const char *words, int odd) { return reg_load((const float *)words); }
INLINE reg pair_fma(reg a, reg b, reg c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#else
/* The odd or the even inputs' weights. */
INLINE reg reg_pairs(const char *words, int odd) {
    const reg word = reg_load((const float *)words);
#if WIDTH == 16
    const __m512i bits = _mm512_castps_si512(word);
    return _mm512_castsi512_ps(odd ? _mm512_and_si512(bits, _mm512_set1_epi32(-65536)) : _mm512_slli_epi32(bits, 16));
#elif WIDTH == 8
    const __m256i bits = _mm256_castps_si256(word);
    return _mm256_castsi256_ps(odd ? _mm256_and_si256(bits, _mm256_set1_epi32(-65536)) : _mm256_slli_epi32(bits, 16));
#else
    return odd ? (reg)((ireg)word & -65536) : (reg)((ireg)word << 16);
#endif
}
INLINE reg pair_fma(reg a, reg b, reg c) { return reg_fma(a, b, c); }
#endif

#endif
