/* Number formats of weights, as detgen/program/storage.py states them: how a register of each is read. All builds give
 * the same bits. */

#ifndef DETGEN_STORED
#define DETGEN_STORED

#include "lanes.h"
#include "layout.h"

static const int64_t stored_bits[] = STORED_BITS;

/* Bytes of an input's weights in a panel. */
static inline int64_t panel_bytes(int64_t storage) { return stored_bits[storage] * PANEL / 8; }

#if WIDTH == 16
INLINE reg reg_bfloat(const uint16_t *x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}
INLINE reg reg_half(const uint16_t *x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)); }
/* Entries of a table of sixteen, whose numbers are the lower or the upper halves of bytes. */
INLINE reg reg_codes(const uint8_t *x, int upper, const float *table) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x)); /* other bits are not looked at */
    return _mm512_permutexvar_ps(upper ? _mm512_srli_epi32(wide, 4) : wide, _mm512_loadu_ps(table));
}
#elif WIDTH == 8
INLINE reg reg_bfloat(const uint16_t *x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16));
}
INLINE reg reg_half(const uint16_t *x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)); }
INLINE reg reg_codes(const uint8_t *x, int upper, const float *table) {
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x));
    wide = upper ? _mm256_srli_epi32(wide, 4) : wide;
    const reg low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), wide); /* by the lowest three bits */
    const reg high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), wide);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 28)));
}
#else
INLINE reg reg_bfloat(const uint16_t *x) {
    ireg wide = {x[0], x[1], x[2], x[3]};
    return (reg)(wide << 16);
}
INLINE reg reg_half(const uint16_t *x) {
    reg out;
    LANE {
        /* The exponent is rebiased by a product, which is exact, also for subnormal numbers. */
        uint32_t sign = (uint32_t)(x[l] & 0x8000) << 16, rest = (uint32_t)(x[l] & 0x7fff) << 13;
        float scaled;
        memcpy(&scaled, &rest, 4);
        scaled *= 0x1p112f;
        memcpy(&rest, &scaled, 4);
        if ((x[l] & 0x7c00) == 0x7c00) rest = 0x7f800000 | (uint32_t)(x[l] & 0x3ff) << 13;
        rest |= sign;
        memcpy(&scaled, &rest, 4);
        out[l] = scaled;
    }
    return out;
}
INLINE reg reg_codes(const uint8_t *x, int upper, const float *table) {
    reg out;
    LANE out[l] = table[upper ? x[l] >> 4 : x[l] & 15];
    return out;
}
#endif

/* A register of weights, from number `c` on; of an input in a panel, its columns. Scales are not applied yet. */
INLINE reg weights(const int storage, const char *input, int c, const float *codes) {
    if (storage == FLOAT) return reg_load((const float *)input + c);
    if (storage == BFLOAT) return reg_bfloat((const uint16_t *)input + c);
    if (storage == HALF) return reg_half((const uint16_t *)input + c);
    return reg_codes((const uint8_t *)input + c % 16, c >= 16, codes);
}

#endif
