/* Linear layers of whole numbers: inputs are rounded to whole numbers from -127 to 127 by groups of 32, whose sums of
 * products are exact in any order; y = fma(sum, the inputs' scale * the weights', y) from zero, group after group, in
 * sections of 1,024 inputs, whose sums are added in their order. */

#ifndef DETGEN_WHOLE
#define DETGEN_WHOLE

#include "stored.h"

#define SECTION (SECTION_PARTS * PART_INPUTS)
#define TOGETHER 4 /* inputs whose weights of a column stand together */
#define QUADS (GROUP / TOGETHER)
#define AHEAD 4096 /* bytes from here that are fetched */

/* The most rows and registers of columns of a tile. */
#if WIDTH == 16
#define WHOLE_ROWS 6
#else
#define WHOLE_ROWS 3
#endif
#define WHOLE_WIDE 2

INLINE int is_whole(int64_t storage) { return storage == BYTE || storage == NIBBLE; }

/* Rows of inputs as whole numbers. */
typedef struct {
    int8_t *entries; /* `row` from each other */
    float *scales;   /* of groups, `group_row` from each other, like the sums */
    int32_t *sums;   /* of a group's entries */
    int64_t row, group_row;
} Rounded;

INLINE Rounded from_row(Rounded x, int64_t row) {
    return (Rounded){x.entries + row * x.row, x.scales + row * x.group_row, x.sums + row * x.group_row, x.row, x.group_row};
}

/* A row, of a whole number of groups. A group that has no finite number, or one that is not, has the scale NaN; one of
 * hardly any magnitude counts as zeros. */
static void round_row(const float *x, int64_t inputs, int8_t *entries, float *scales, int32_t *sums) {
    const vec magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number, which the lowest bits are */
    for (int64_t g = 0; g < inputs / GROUP; g++, x += GROUP, entries += GROUP) {
        vec most = all(-1.0f), rest = all(0.0f);
        for (int i = 0; i < GROUP; i += LANES) {
            const vec v = load(x + i), size = magnitude(v);
            most = where_more(size, most, size, most);
            rest = add(rest, sub(v, v)); /* 0, or NaN where an entry is not finite */
        }
        const float top = most_of(most), none = fold(rest);
        const int zero = top < (float)LEAST || none != 0.0f; /* also where none is NaN */
        const vec factor = all(zero ? 0.0f : 127.0f / top);
        int32_t bits[GROUP], sum = 0;
        for (int i = 0; i < GROUP; i += LANES) {
            const vec v = add(mul(zero ? all(0.0f) : load(x + i), factor), magic);
            memcpy(bits + i, &v, sizeof v);
        }
        for (int i = 0; i < GROUP; i++) entries[i] = (int8_t)bits[i], sum += (int8_t)bits[i];
        scales[g] = none != 0.0f ? NAN : zero ? 0.0f : top / 127.0f;
        sums[g] = sum;
    }
}

/* Sums of products of four inputs, of WIDTH columns; `codes` are weights plus `base_of(storage)`. */
#if WIDTH == 16
typedef __m512i codes_reg;
typedef __m512i sums_reg;
INLINE sums_reg sums_all(int32_t x) { return _mm512_set1_epi32(x); }
INLINE reg sums_floats(sums_reg x) { return _mm512_cvtepi32_ps(x); }
INLINE codes_reg codes_load(const uint8_t *x) { return _mm512_loadu_si512(x); }
INLINE codes_reg codes_half(codes_reg x, int upper) {
    return _mm512_and_si512(upper ? _mm512_srli_epi16(x, 4) : x, _mm512_set1_epi8(15));
}
#ifdef __AVX512VNNI__
INLINE int base_of(int storage) { return storage == BYTE ? 128 : 8; }
INLINE sums_reg dot(int storage, sums_reg sums, codes_reg w, codes_reg x) { return _mm512_dpbusd_epi32(sums, w, x); }
#else
INLINE int base_of(int storage) { return storage == BYTE ? 0 : 8; }
INLINE sums_reg dot(int storage, sums_reg sums, codes_reg w, codes_reg x) {
    if (storage == BYTE) { /* products of a pair might not fit 16 bits with what the weights are stored as */
        w = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
        x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
        w = _mm512_abs_epi8(w);
    }
    return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
}
#endif
#elif WIDTH == 8
typedef __m256i codes_reg;
typedef __m256i sums_reg;
INLINE sums_reg sums_all(int32_t x) { return _mm256_set1_epi32(x); }
INLINE reg sums_floats(sums_reg x) { return _mm256_cvtepi32_ps(x); }
INLINE codes_reg codes_load(const uint8_t *x) { return _mm256_loadu_si256((const __m256i *)x); }
INLINE codes_reg codes_half(codes_reg x, int upper) {
    return _mm256_and_si256(upper ? _mm256_srli_epi16(x, 4) : x, _mm256_set1_epi8(15));
}
INLINE int base_of(int storage) { return storage == BYTE ? 0 : 8; }
INLINE sums_reg dot(int storage, sums_reg sums, codes_reg w, codes_reg x) {
    if (storage == BYTE) { /* products of a pair might not fit 16 bits with what the weights are stored as */
        w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        x = _mm256_sign_epi8(x, w);
        w = _mm256_abs_epi8(w);
    }
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
#else
typedef uint8_t codes_reg __attribute__((vector_size(16)));
typedef int8_t entries_reg __attribute__((vector_size(16)));
typedef ireg sums_reg;
INLINE sums_reg sums_all(int32_t x) { return (sums_reg){x, x, x, x}; }
INLINE reg sums_floats(sums_reg x) { return __builtin_convertvector(x, reg); }
INLINE codes_reg codes_load(const uint8_t *x) {
    codes_reg v;
    memcpy(&v, x, sizeof v);
    return v;
}
INLINE codes_reg codes_half(codes_reg x, int upper) { return upper ? x >> 4 : x & 15; }
#ifdef __ARM_FEATURE_DOTPROD
INLINE int base_of(int storage) { return storage == BYTE ? 0 : 8; }
INLINE sums_reg dot(int storage, sums_reg sums, codes_reg w, codes_reg x) {
    if (storage == BYTE) w ^= 128;
    return (sums_reg)vdotq_s32((int32x4_t)sums, (int8x16_t)w, (int8x16_t)x);
}
#elif defined(__aarch64__)
INLINE int base_of(int storage) { return storage == BYTE ? 0 : 8; }
INLINE sums_reg dot(int storage, sums_reg sums, codes_reg w, codes_reg x) {
    if (storage == BYTE) w ^= 128;
    const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)w), vget_low_s8((int8x16_t)x));
    const int16x8_t high = vmull_high_s8((int8x16_t)w, (int8x16_t)x);
    return sums + (sums_reg)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
}
#else
INLINE int base_of(int storage) { return storage == BYTE ? 128 : 8; }
INLINE sums_reg dot(int storage, sums_reg sums, codes_reg w, codes_reg x) {
    const entries_reg entries = (entries_reg)x;
    for (int l = 0; l < WIDTH; l++)
        for (int i = 0; i < TOGETHER; i++) sums[l] += w[l * TOGETHER + i] * entries[l * TOGETHER + i];
    return sums;
}
#endif
#endif

/* Four inputs, for each column. */
INLINE codes_reg four_entries(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return (codes_reg)sums_all(four);
}

/* Weights of a register of columns, number `c`, of four inputs. */
INLINE codes_reg whole_codes(int storage, const uint8_t *four, int c) {
    const int bytes = WIDTH * TOGETHER, at = c * bytes, half = PANEL * TOGETHER / 2;
    if (storage == BYTE) return codes_load(four + at);
    return codes_half(codes_load(four + at % half), at >= half);
}

/* A section of a panel, up to SECTION inputs, for some rows and registers of columns. */
INLINE void whole_tile(
    const int rows, const int wide, const int storage, int from, const uint8_t *panel, const float *scales, Rounded x,
    int64_t groups, float *sums, int64_t sums_row, int64_t adds) {
    const int64_t bytes = TOGETHER * panel_bytes(storage);
    reg to[WHOLE_ROWS][WHOLE_WIDE];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int c = 0; c < wide; c++) to[r][c] = reg_all(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        sums_reg all[WHOLE_ROWS][WHOLE_WIDE];
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int c = 0; c < wide; c++) all[r][c] = sums_all(-base_of(storage) * x.sums[r * x.group_row + g]);
#pragma GCC unroll 8
        for (int i = 0; i < QUADS; i++, panel += bytes) {
            __builtin_prefetch(panel + AHEAD, 0, 2);
            if (storage == BYTE) __builtin_prefetch(panel + AHEAD + 64, 0, 2);
            codes_reg w[WHOLE_WIDE];
#pragma GCC unroll 2
            for (int c = 0; c < wide; c++) w[c] = whole_codes(storage, panel, from + c);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const codes_reg b = four_entries(x.entries + r * x.row + g * GROUP + i * TOGETHER);
#pragma GCC unroll 2
                for (int c = 0; c < wide; c++) all[r][c] = dot(storage, all[r][c], w[c], b);
            }
        }
        reg scale[WHOLE_WIDE];
#pragma GCC unroll 2
        for (int c = 0; c < wide; c++) scale[c] = reg_load(scales + g * PANEL + (from + c) * WIDTH);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const reg own = reg_all(x.scales[r * x.group_row + g]);
#pragma GCC unroll 2
            for (int c = 0; c < wide; c++) to[r][c] = reg_fma(sums_floats(all[r][c]), own * scale[c], to[r][c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int c = 0; c < wide; c++) {
            float *at = sums + r * sums_row + (from + c) * WIDTH;
            if (adds) to[r][c] = reg_load(at) + to[r][c];
            reg_store(at, to[r][c]);
        }
}

INLINE void whole_section(
    const int storage, const uint8_t *panel, const float *scales, Rounded x, int64_t rows, int64_t groups, float *sums,
    int64_t sums_row, int64_t adds) {
    for (int64_t r = 0; r < rows;) {
        const int64_t left = rows - r, tiles = (left + WHOLE_ROWS - 1) / WHOLE_ROWS, step = (left + tiles - 1) / tiles;
#define ROWS(R) \
    case R: \
        for (int c = 0; c < PANEL / WIDTH; c += WHOLE_WIDE) \
            whole_tile(R, WHOLE_WIDE, storage, c, panel, scales, from_row(x, r), groups, sums + r * sums_row, sums_row, adds); \
        break;
        switch (step) {
            ROWS(1) ROWS(2) ROWS(3)
#if WHOLE_ROWS > 3
            ROWS(4) ROWS(5) ROWS(6)
#endif
        }
#undef ROWS
        r += step;
    }
}

/* The sums of some panels for some rows, without the bias: sums [rows, panels, PANEL], their rows `sums_row` apart. */
static void whole_products(
    const Weight *weight, int64_t panel, int64_t panels, Rounded x, int64_t rows, float *sums, int64_t sums_row) {
    const int64_t bytes = panel_bytes(weight->storage);
    for (int64_t first = 0; first < weight->inputs; first += SECTION) {
        const int64_t left = weight->inputs - first, groups = (left < SECTION ? left : SECTION) / GROUP;
        Rounded some = x;
        some.entries += first, some.scales += first / GROUP, some.sums += first / GROUP;
        for (int64_t p = 0; p < panels; p++) {
            const int64_t at = (panel + p) * weight->inputs + first;
            const uint8_t *w = (const uint8_t *)weight->data + at * bytes;
            const float *scales = weight->scales + at / GROUP * PANEL;
            if (weight->storage == BYTE) whole_section(BYTE, w, scales, some, rows, groups, sums + p * PANEL, sums_row, first);
            else whole_section(NIBBLE, w, scales, some, rows, groups, sums + p * PANEL, sums_row, first);
        }
    }
}

#endif
