/* Linear layers of whole numbers: inputs are rounded to whole numbers from -127 to 127 by groups of 32, whose sums of
 * products are exact in any order. A group's sum times the weights' scale, plus the group's minimum times the sum of its
 * inputs if there is one, is multiplied by the inputs' scale and added to those before, from zero in sections of 1,024
 * inputs, whose sums are added in their order. */

#ifndef DETGEN_WHOLE
#define DETGEN_WHOLE

#include "few_bits.h"

#define QUADS (GROUP / TOGETHER)

/* The most rows and registers of columns of a tile. */
#if WIDTH == 16
#define WHOLE_ROWS 6
#else
#define WHOLE_ROWS 3
#endif
#if WIDTH == 4
#define UNROLLED_QUADS
#else
#define UNROLLED_QUADS _Pragma("GCC unroll 8")
#endif
#define WHOLE_WIDE 2
#define WHOLE_FEW (WIDTH == 8) /* rows up to which a tile has all columns of a panel instead */

/* Rows of inputs as whole numbers. */
typedef struct {
    int8_t *entries; /* `row` from each other */
    float *scales;   /* of groups, `group_row` from each other */
    int32_t *sums;   /* of the entries of halves of groups, two of each */
    int64_t row, group_row;
} Rounded;

INLINE Rounded from_row(Rounded x, int64_t row) {
    return (Rounded){
        x.entries + row * x.row, x.scales + row * x.group_row, x.sums + row * 2 * x.group_row, x.row, x.group_row};
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
        int32_t bits[GROUP], low = 0, high = 0;
        for (int i = 0; i < GROUP; i += LANES) {
            const vec v = add(mul(zero ? all(0.0f) : load(x + i), factor), magic);
            memcpy(bits + i, &v, sizeof v);
        }
        for (int i = 0; i < GROUP; i++) entries[i] = (int8_t)bits[i];
        for (int i = 0; i < HALF_GROUP; i++) low += (int8_t)bits[i], high += (int8_t)bits[HALF_GROUP + i];
        sums[2 * g] = low, sums[2 * g + 1] = high;
        scales[g] = none != 0.0f ? NAN : zero ? 0.0f : top / 127.0f;
    }
}

/* Sums of products of four inputs, of WIDTH columns. `wide` codes may take all bits of a byte: see WIDE_LEAST. Where
 * pairs of inputs are summed in 16 bits first, BY_PAIRS, several such sums are added before they are widened. */
#if WIDTH == 16
typedef __m512i sums_reg;
INLINE sums_reg sums_all(int32_t x) { return _mm512_set1_epi32(x); }
INLINE reg sums_floats(sums_reg x) { return _mm512_cvtepi32_ps(x); }
#ifdef __AVX512VNNI__
INLINE sums_reg dot(int wide, sums_reg sums, codes_reg w, codes_reg x) { return _mm512_dpbusd_epi32(sums, w, x); }
#else
#define BY_PAIRS
INLINE sums_reg pairs_dot(int wide, codes_reg w, codes_reg x) {
    if (wide) { /* products of a pair might not fit 16 bits with what the weights are stored as */
        w = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
        x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
        w = _mm512_abs_epi8(w);
    }
    return _mm512_maddubs_epi16(w, x);
}
INLINE sums_reg pairs_add(sums_reg a, sums_reg b) { return _mm512_add_epi16(a, b); }
INLINE sums_reg in_32_bits(sums_reg sums, sums_reg pairs) {
    return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#endif
#elif WIDTH == 8
typedef __m256i sums_reg;
INLINE sums_reg sums_all(int32_t x) { return _mm256_set1_epi32(x); }
INLINE reg sums_floats(sums_reg x) { return _mm256_cvtepi32_ps(x); }
#ifdef __AVXVNNI__
INLINE sums_reg dot(int wide, sums_reg sums, codes_reg w, codes_reg x) { return _mm256_dpbusd_avx_epi32(sums, w, x); }
#else
#define BY_PAIRS
INLINE sums_reg pairs_dot(int wide, codes_reg w, codes_reg x) {
    if (wide) { /* products of a pair might not fit 16 bits with what the weights are stored as */
        w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        x = _mm256_sign_epi8(x, w);
        w = _mm256_abs_epi8(w);
    }
    return _mm256_maddubs_epi16(w, x);
}
INLINE sums_reg pairs_add(sums_reg a, sums_reg b) { return _mm256_add_epi16(a, b); }
INLINE sums_reg in_32_bits(sums_reg sums, sums_reg pairs) {
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    __asm__("" : "+x"(sums)); /* else compilers add these to each other first, for which registers are too few */
    return sums;
}
#endif
#else
typedef int8_t entries_reg __attribute__((vector_size(16)));
typedef int16_t products_reg __attribute__((vector_size(32)));
typedef int32_t pairs_reg __attribute__((vector_size(32)));
typedef ireg sums_reg;
INLINE sums_reg sums_all(int32_t x) { return (sums_reg){x, x, x, x}; }
INLINE reg sums_floats(sums_reg x) { return __builtin_convertvector(x, reg); }
#ifdef __ARM_FEATURE_DOTPROD
INLINE sums_reg dot(int wide, sums_reg sums, codes_reg w, codes_reg x) {
    if (wide) w ^= 128;
    return (sums_reg)vdotq_s32((int32x4_t)sums, (int8x16_t)w, (int8x16_t)x);
}
#elif defined(__aarch64__)
INLINE sums_reg dot(int wide, sums_reg sums, codes_reg w, codes_reg x) {
    if (wide) w ^= 128;
    const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)w), vget_low_s8((int8x16_t)x));
    const int16x8_t high = vmull_high_s8((int8x16_t)w, (int8x16_t)x);
    return sums + (sums_reg)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
}
#else
INLINE sums_reg dot(int wide, sums_reg sums, codes_reg w, codes_reg x) {
    const products_reg all =
        __builtin_convertvector(w, products_reg) * __builtin_convertvector((entries_reg)x, products_reg);
    const pairs_reg pairs = ((pairs_reg)all << 16 >> 16) + ((pairs_reg)all >> 16);
    for (int l = 0; l < WIDTH; l++) sums[l] += pairs[2 * l] + pairs[2 * l + 1];
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

/* Up to SECTION inputs of a panel for some rows and registers of columns, added to the sections before if `adds`. */
INLINE void whole_tile(
    const Kind kind, const int rows, const int wide, int from, const Stretch *w, Rounded x, float *sums, int64_t sums_row,
    int64_t adds) {
    const int halves = kind.halves, bytes = (kind.low + kind.high) * QUAD / 8;
    reg to[WHOLE_ROWS][PANEL / WIDTH];
#define EACH_ROW _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++)
#define EACH _Pragma("GCC unroll 8") for (int c = 0; c < wide; c++)
    EACH_ROW EACH to[r][c] = reg_all(0.0f);
    const uint8_t *quad = w->data;
    for (int64_t g = 0; g < w->groups; g++) {
        reg scaled[WHOLE_ROWS][PANEL / WIDTH];
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++) {
            sums_reg all[WHOLE_ROWS][PANEL / WIDTH];
#ifdef BY_PAIRS
            sums_reg pairs[WHOLE_ROWS][PANEL / WIDTH];
#endif
            EACH_ROW {
                const int32_t *total = x.sums + 2 * (r * x.group_row + g) + h;
                EACH all[r][c] = sums_all(w->least * (halves == 2 ? total[0] : total[0] + total[1]));
            }
            UNROLLED_QUADS
            for (int i = 0; i < QUADS / halves; i++, quad += bytes) {
                __builtin_prefetch(quad + AHEAD, 0, 2);
                if (bytes > 64) __builtin_prefetch(quad + AHEAD + 64, 0, 2);
                codes_reg four[PANEL / WIDTH];
                EACH four[c] = codes_of(kind, quad, from + c, w->levels);
                EACH_ROW {
                    const codes_reg b = four_entries(x.entries + r * x.row + g * GROUP + h * HALF_GROUP + i * TOGETHER);
#ifdef BY_PAIRS
                    EACH {
                        const sums_reg two = pairs_dot(kind.wide, four[c], b);
                        pairs[r][c] = i % kind.joint ? pairs_add(pairs[r][c], two) : two;
                        if ((i + 1) % kind.joint == 0 || i + 1 == QUADS / halves)
                            all[r][c] = in_32_bits(all[r][c], pairs[r][c]);
                    }
#else
                    EACH all[r][c] = dot(kind.wide, all[r][c], four[c], b);
#endif
                }
            }
            reg scale[PANEL / WIDTH];
            EACH scale[c] = reg_load(w->scales + (g * halves + h) * PANEL + (from + c) * WIDTH);
            EACH_ROW EACH {
                const reg product = sums_floats(all[r][c]);
                if (h) scaled[r][c] = reg_fma(product, scale[c], scaled[r][c]);
                else scaled[r][c] = product * scale[c];
            }
        }
        for (int h = 0; kind.minima && h < halves; h++) {
            reg minimum[PANEL / WIDTH];
            EACH minimum[c] = reg_load(w->minima + (g * halves + h) * PANEL + (from + c) * WIDTH);
            EACH_ROW {
                const int32_t *total = x.sums + 2 * (r * x.group_row + g) + h;
                const reg sum = reg_all((float)(halves == 2 ? total[0] : total[0] + total[1]));
                EACH scaled[r][c] = reg_fma(sum, minimum[c], scaled[r][c]);
            }
        }
        EACH_ROW {
            const reg own = reg_all(x.scales[r * x.group_row + g]);
            EACH to[r][c] = reg_fma(scaled[r][c], own, to[r][c]);
        }
    }
    EACH_ROW EACH {
        float *at = sums + r * sums_row + (from + c) * WIDTH;
        if (adds) to[r][c] = reg_load(at) + to[r][c];
        reg_store(at, to[r][c]);
    }
#undef EACH
#undef EACH_ROW
}

INLINE void whole_rows(
    const Kind kind, const Stretch *w, Rounded x, int64_t rows, float *sums, int64_t sums_row, int64_t adds) {
    for (int64_t r = 0; r < rows;) {
        const int64_t left = rows - r, tiles = (left + WHOLE_ROWS - 1) / WHOLE_ROWS, step = (left + tiles - 1) / tiles;
#define ROWS(R) \
    case R: \
        if (R <= WHOLE_FEW) \
            whole_tile(kind, R, PANEL / WIDTH, 0, w, from_row(x, r), sums + r * sums_row, sums_row, adds); \
        else \
            _Pragma("GCC unroll 1") for (int c = 0; c < PANEL / WIDTH; c += WHOLE_WIDE) \
                whole_tile(kind, R, WHOLE_WIDE, c, w, from_row(x, r), sums + r * sums_row, sums_row, adds); \
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
    const int64_t number = kind_number(weight);
    ScaleFloats room;
    for (int64_t first = 0; first < weight->inputs; first += SECTION) {
        const int64_t left = weight->inputs - first;
        Rounded some = x;
        some.entries += first, some.scales += first / GROUP, some.sums += first / HALF_GROUP;
        for (int64_t p = 0; p < panels; p++) {
            const Stretch w = stretch_of(weight, panel + p, first, left < SECTION ? left : SECTION, &room);
#define MULTIPLIED(NUMBER, ...) \
    case NUMBER: whole_rows((Kind){__VA_ARGS__}, &w, some, rows, sums + p * PANEL, sums_row, first); break;
            switch (number) { WHOLE_KINDS(MULTIPLIED) }
#undef MULTIPLIED
        }
    }
}

#endif
