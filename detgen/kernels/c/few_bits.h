/* Weights in few bits as they are read: whole numbers as bytes, scales and minima as floats. */

#ifndef DETGEN_FEW_BITS
#define DETGEN_FEW_BITS

#include "stored.h"

#define TOGETHER 4 /* inputs whose weights of a column stand together */
#define HALF_GROUP (GROUP / 2) /* the fewest inputs that share a scale */
#define AHEAD 3072 /* bytes from here that are fetched; a page ahead, single rows would take 1.3 times as long */
#define SECTION (SECTION_PARTS * PART_INPUTS)
#define QUAD (PANEL * TOGETHER)

INLINE int is_core(int64_t storage) { return storage == TC25 || storage == TC24; } /* see cores.h */
INLINE int is_whole(int64_t storage) { return storage >= BYTE && storage != CODE; }

/* What the code that multiplies weights is made for: the bits of their planes, whether they are levels, whether codes
 * may take all bits of a byte, scales a group, whether there are minima, and how many products of a pair fit 16 bits. */
typedef struct {
    int low, high, levels, wide, halves, minima, joint;
} Kind;

/* What is added to wide codes when they are multiplied. Where processors multiply signed bytes, or where products of a
 * pair of unsigned ones might not fit 16 bits, codes become signed first. */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || (WIDTH == 4 && !defined(__aarch64__))
#define WIDE_LEAST -128
#else
#define WIDE_LEAST 0
#endif

static const int stored_least[] = STORED_LEAST;
static const uint8_t stored_levels[][16] = STORED_LEVELS;

/* Some inputs of a panel, of which there are whole groups. */
typedef struct {
    const uint8_t *data, *levels;
    const float *scales; /* [groups of the weight, PANEL] */
    const float *minima; /* likewise; null for none */
    int64_t groups;      /* of GROUP inputs */
    int32_t least;       /* what is left to add to the codes when they are multiplied */
} Stretch;

typedef struct {
    float scales[SECTION / HALF_GROUP * PANEL], minima[SECTION / HALF_GROUP * PANEL];
} __attribute__((aligned(64))) ScaleFloats;

/* Registers of bytes; each has TOGETHER inputs of WIDTH columns. A plane of 4, 2 or 1 bits has those of register number
 * c of a quad of inputs in what `plane` reads. */
#if WIDTH == 16
typedef __m512i codes_reg;
INLINE codes_reg codes_load(const uint8_t *x) { return _mm512_loadu_si512(x); }
INLINE codes_reg plane(const uint8_t *x, int bits, int c) {
    __m512i v, shifts = _mm512_set1_epi32(4 * c);
    if (bits == 8) return codes_load(x + c * 64);
    if (bits == 4) v = codes_load(x);
    else if (bits == 2) {
        v = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)x));
        shifts = _mm512_add_epi32(shifts, _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2));
    } else {
        v = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)x));
        shifts = _mm512_add_epi32(shifts, _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
    }
    v = _mm512_srlv_epi32(v, shifts);
    return _mm512_and_si512(v, _mm512_set1_epi8((char)((1 << bits) - 1)));
}
INLINE codes_reg above(codes_reg low, codes_reg high, int bits) {
    return _mm512_or_si512(low, _mm512_slli_epi32(high, bits));
}
INLINE codes_reg levels_of(codes_reg x, const uint8_t *levels) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)levels)), x);
}
INLINE reg reg_steps(const int8_t *x) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
}
#elif WIDTH == 8
typedef __m256i codes_reg;
INLINE codes_reg codes_load(const uint8_t *x) { return _mm256_loadu_si256((const __m256i *)x); }
INLINE codes_reg plane(const uint8_t *x, int bits, int c) {
    __m256i v;
    if (bits == 8) return codes_load(x + c * 32);
    if (bits == 4) v = _mm256_srl_epi32(codes_load(x + c % 2 * 32), _mm_cvtsi32_si128(c / 2 * 4));
    else if (bits == 2) v = _mm256_srl_epi32(codes_load(x), _mm_cvtsi32_si128(2 * c));
    else
        v = _mm256_srlv_epi32(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)x)),
                              _mm256_add_epi32(_mm256_set1_epi32(2 * c), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)));
    return _mm256_and_si256(v, _mm256_set1_epi8((char)((1 << bits) - 1)));
}
INLINE codes_reg above(codes_reg low, codes_reg high, int bits) {
    return _mm256_or_si256(low, _mm256_sll_epi32(high, _mm_cvtsi32_si128(bits)));
}
INLINE codes_reg levels_of(codes_reg x, const uint8_t *levels) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)levels)), x);
}
INLINE reg reg_steps(const int8_t *x) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)));
}
#else
typedef uint8_t codes_reg __attribute__((vector_size(16)));
INLINE codes_reg codes_load(const uint8_t *x) {
    codes_reg v;
    memcpy(&v, x, sizeof v);
    return v;
}
INLINE codes_reg plane(const uint8_t *x, int bits, int c) {
    return codes_load(x + c % bits * 16) >> (c / bits * bits) & (uint8_t)((1 << bits) - 1);
}
INLINE codes_reg above(codes_reg low, codes_reg high, int bits) { return low | high << bits; }
INLINE codes_reg levels_of(codes_reg x, const uint8_t *levels) {
#ifdef __aarch64__
    return (codes_reg)vqtbl1q_u8(vld1q_u8(levels), (uint8x16_t)x);
#else
    for (int i = 0; i < 16; i++) x[i] = levels[x[i]];
    return x;
#endif
}
INLINE reg reg_steps(const int8_t *x) { return (reg){x[0], x[1], x[2], x[3]}; }
#endif

/* Register number c of a quad of inputs. */
INLINE codes_reg codes_of(const Kind kind, const uint8_t *quad, int c, const uint8_t *levels) {
    codes_reg v = plane(quad, kind.low, c);
    if (kind.high) v = above(v, plane(quad + kind.low * QUAD / 8, kind.high, c), kind.low);
    if (kind.levels) v = levels_of(v, levels);
    return v;
}

/* Steps of some groups, times their units if they have any, as floats. */
INLINE void scale_floats(
    const int storage, const char *steps, const uint16_t *units, int64_t of_unit, int64_t groups, float *to) {
    for (int64_t first = 0; first < groups; first += of_unit, units += PANEL) {
        const int64_t end = first + of_unit < groups ? first + of_unit : groups;
        for (int c = 0; c < PANEL; c += WIDTH) {
            const reg unit = storage == BYTE ? reg_half(units + c) : reg_all(1.0f);
            for (int64_t at = first * PANEL + c; at < end * PANEL; at += PANEL) {
                reg x;
                if (storage == BYTE) x = reg_steps((const int8_t *)steps + at) * unit;
                else x = weights(storage, steps, (int)at, 0);
                reg_store(to + at, x);
            }
        }
    }
}

/* Scales or minima of a stretch that begins `at` inputs from a panel's first, counted over the panels before, too. */
static const float *floats_of(
    const Scales *scales, const void *steps, const void *units, int64_t at, int64_t inputs, float *room) {
    const int64_t first = at / scales->group * PANEL, groups = inputs / scales->group;
    if (!steps) return 0;
    if (scales->storage == FLOAT) return (const float *)steps + first;
    if (scales->storage == BYTE)
        scale_floats(BYTE, (const char *)steps + first, (const uint16_t *)units + at / UNIT * PANEL,
                     UNIT / scales->group, groups, room);
    else if (scales->storage == HALF) scale_floats(HALF, (const char *)steps + 2 * first, 0, groups, groups, room);
    else scale_floats(BFLOAT, (const char *)steps + 2 * first, 0, groups, groups, room);
    return room;
}

/* Some inputs of a panel, at most SECTION. */
static Stretch stretch_of(const Weight *weight, int64_t panel, int64_t first, int64_t inputs, ScaleFloats *room) {
    const int64_t at = panel * weight->inputs + first, storage = weight->storage;
    const Scales *scales = &weight->scales;
    Stretch made = {.groups = inputs / GROUP, .levels = stored_levels[storage]};
    made.data = (const uint8_t *)weight->data + at * panel_bytes(storage);
    made.least = storage == BYTE || storage == LEVEL ? WIDE_LEAST : scales->minima ? 0 : stored_least[storage];
    made.scales = floats_of(scales, scales->steps, scales->units, at, inputs, room->scales);
    made.minima = floats_of(scales, scales->minima, scales->minimum_units, at, inputs, room->minima);
    return made;
}

/* The number of a weight's kind, as WHOLE_KINDS counts them. */
INLINE int64_t kind_number(const Weight *weight) {
    return KIND_NUMBER(weight->storage, GROUP / weight->scales.group, weight->scales.minima != 0);
}

INLINE int plane_at(const uint8_t *plane, int bits, int64_t place) {
    const int64_t bytes = QUAD * bits / 8;
    return plane[place % bytes] >> place / bytes * bits & ((1 << bits) - 1);
}

/* One weight: that of an input, counted from where `data` begins, and a column of a panel. */
static int whole_at(const Weight *weight, const uint8_t *data, int64_t column, int64_t input) {
#define KIND_AT(NUMBER, ...) [NUMBER] = {__VA_ARGS__},
    static const Kind kinds[] = {WHOLE_KINDS(KIND_AT)};
#undef KIND_AT
    const Kind kind = kinds[kind_number(weight)];
    const uint8_t *quad = data + input / TOGETHER * panel_bytes(weight->storage) * TOGETHER;
    const int64_t place = column * TOGETHER + input % TOGETHER;
    int code = plane_at(quad, kind.low, place);
    if (kind.high) code |= plane_at(quad + kind.low * QUAD / 8, kind.high, place) << kind.low;
    if (kind.levels) code = stored_levels[weight->storage][code];
    return code + (kind.minima ? 0 : stored_least[weight->storage]);
}

#endif
