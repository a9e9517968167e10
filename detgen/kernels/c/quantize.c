/* Weights in floating point become whole numbers of few bits, times scales: q8, q4 and q4_k (quantizing.py). Sixteen
 * columns at a time, each by itself, in operations of IEEE 754 that are not contracted: the same bytes on every
 * processor, by any number of threads.
 *
 * Of q4_k, each group gets the line, scale and minimum, whose whole numbers come nearest to its weights: candidates
 * differ in how many steps the group's range has, each is fitted by least squares. Scales and minima that share units are
 * rounded to whole numbers of these, to the best of the nearest ones and their neighbours. */

#include <stdatomic.h>

#include "few_bits.h"
#include "pool.h"

#define CANDIDATE_LINES 16
#define FEWEST_STEPS 65 /* fifths of a step that the first candidate has between a group's extremes */
#define MOST 15.0f      /* the largest number of 4 bits */
#define MOST_SCALE 63.0f
#define UNIT_GROUPS (UNIT / GROUP)

INLINE vec smaller(vec a, vec b) { return where_more(a, b, b, a); }
INLINE vec larger(vec a, vec b) { return where_more(a, b, a, b); }
INLINE vec between(vec x, float low, float high) { return larger(smaller(x, all(high)), all(low)); }
INLINE vec rounded(vec x) { /* to the nearest whole number, of ties the even one, below 2^22 in magnitude */
    const vec magic = all(12582912.0f);
    return sub(add(x, magic), magic);
}
/* 1 / x, and 0 of 0. */
INLINE vec inverse(vec x) {
    const vec zero = all(0.0f);
    return where_more(magnitude(x), zero, quotient(all(1.0f), x), zero);
}

/* The nearest float16 number, of ties the even one. */
static uint16_t half_of(float x) {
    uint32_t bits, sign;
    float size = fabsf(x);
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000;
    if (!(size < 65520.0f)) return (uint16_t)(sign | 0x7c00);
    if (size < 0x1p-14f) { /* multiples of 2^-24, as floats from 0.5 to 1 are */
        size += 0.5f;
        memcpy(&bits, &size, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    bits &= 0x7fffffff;
    return (uint16_t)(sign | (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}

typedef struct {
    const Quantization *of;
    atomic_int next, broken;
} Job;

/* Sixteen columns of some groups of inputs. */
typedef struct {
    vec x[UNIT], whole[UNIT];
    vec scales[UNIT_GROUPS], minima[UNIT_GROUPS];
} Columns;

/* Rounds sixteen numbers to float16, and keeps them in one of the two halves of a row of scales. */
static vec halves(vec x, uint16_t *to, int *broken) {
    float numbers[LANES];
    uint16_t made[LANES];
    vec found;
    store(numbers, x);
    for (int l = 0; l < LANES; l++) {
        made[l] = half_of(numbers[l]);
        *broken |= (made[l] & 0x7c00) == 0x7c00;
    }
    PART found.r[p] = reg_half(made + p * WIDTH);
    if (to) memcpy(to, made, sizeof made);
    return found;
}

/* Keeps whole numbers as bytes. */
static void put_steps(vec x, int8_t *to) {
    float numbers[LANES];
    store(numbers, x);
    for (int l = 0; to && l < LANES; l++) to[l] = (int8_t)numbers[l];
}

static void load_columns(const Quantization *s, const void *const *rows, int64_t first, int64_t inputs, Columns *to, int *broken) {
    float room[LANES][GROUP], numbers[LANES];
    vec nothing = all(0.0f);
    for (int64_t g = 0; g < inputs; g += GROUP) {
        for (int l = 0; l < LANES; l++) {
            if (!rows[l]) {
                memset(room[l], 0, sizeof room[l]);
                continue;
            }
            const char *from = (const char *)rows[l] + (first + g) * (s->stored == FLOAT ? 4 : 2);
            for (int i = 0; i < GROUP; i += WIDTH)
                reg_store(room[l] + i, s->stored == FLOAT    ? weights(FLOAT, from, i, 0)
                                       : s->stored == BFLOAT ? weights(BFLOAT, from, i, 0)
                                                             : weights(HALF, from, i, 0));
        }
        for (int i = 0; i < GROUP; i++) {
            for (int l = 0; l < LANES; l++) numbers[l] = room[l][i];
            to->x[g + i] = load(numbers);
            nothing = add(nothing, mul(to->x[g + i], all(0.0f)));
        }
    }
    *broken |= !(fold(nothing) == 0);
}

/* The same columns of a weight that is in panels already. */
static void load_packed(const Quantization *s, int64_t panel, int column, int64_t first, int64_t inputs, Columns *to, int *broken) {
    const char *from = (const char *)s->packed + panel * s->inputs * panel_bytes(s->stored);
    vec nothing = all(0.0f);
    for (int64_t i = 0; i < inputs; i++) {
        const char *input = from + (first + i) * panel_bytes(s->stored);
        if (s->stored == PAIR || is_core(s->stored)) { /* the even input of two is in the lower half of a word */
            const int odd = (first + i) % 2;
            float numbers[LANES];
            uint32_t words[LANES];
            memcpy(words, input - odd * panel_bytes(PAIR) + column * sizeof *words, sizeof words);
            for (int l = 0; l < LANES; l++) numbers[l] = as_float(odd ? words[l] & 0xffff0000 : words[l] << 16);
            to->x[i] = load(numbers);
        } else
            PART to->x[i].r[p] = s->stored == FLOAT    ? weights(FLOAT, input, column + p * WIDTH, 0)
                                 : s->stored == BFLOAT ? weights(BFLOAT, input, column + p * WIDTH, 0)
                                                       : weights(HALF, input, column + p * WIDTH, 0);
        nothing = add(nothing, mul(to->x[i], all(0.0f)));
    }
    *broken |= !(fold(nothing) == 0);
}

/* Whole numbers without minima: the largest magnitude of a group becomes `most`, or the first weight that has it. */
static void largest(const Quantization *s, Columns *of, uint16_t *scale, int *broken) {
    const int wide = s->storage == BYTE;
    vec most = all(0.0f);
    for (int i = 0; i < GROUP; i++) most = where_more(magnitude(of->x[i]), magnitude(most), of->x[i], most);
    if (wide) most = magnitude(most);
    of->scales[0] = halves(quotient(most, all(wide ? 127.0f : -8.0f)), scale, broken);
    const vec times = inverse(of->scales[0]);
    for (int i = 0; i < GROUP; i++)
        of->whole[i] = wide ? between(rounded(mul(of->x[i], times)), -127, 127) : between(rounded(mul(of->x[i], times)), -8, 7);
}

/* The line, scale and minimum, of numbers from 0 to MOST that is nearest to a group of weights. Minima are not positive. */
static void nearest_line(const vec *x, vec *scale, vec *minimum) {
    const vec zero = all(0.0f), n = all(GROUP);
    vec low = zero, high = x[0], sum = zero, t[GROUP];
    for (int i = 0; i < GROUP; i++) low = smaller(low, x[i]), high = larger(high, x[i]);
    /* From here on, weights are counted from the lowest one, or from 0, on, in parts of their range. */
    const vec range = sub(high, low), times = inverse(range), nought = mul(sub(zero, low), times);
    for (int i = 0; i < GROUP; i++) t[i] = mul(sub(x[i], low), times), sum = add(sum, t[i]);
    vec best = all(-1.0f), slope = all(1 / MOST), base = zero;
    for (int c = 0; c < CANDIDATE_LINES; c++) {
        const vec steps = all((float)(FEWEST_STEPS + c) / 5);
        vec q1 = zero, q2 = zero, qt = zero;
        for (int i = 0; i < GROUP; i++) {
            const vec q = smaller(rounded(mul(t[i], steps)), all(MOST));
            q1 = add(q1, q), q2 = add(q2, mul(q, q)), qt = add(qt, mul(q, t[i]));
        }
        const vec spread = sub(mul(n, q2), mul(q1, q1));
        vec a = mul(sub(mul(n, qt), mul(q1, sum)), inverse(spread));
        vec b = quotient(sub(sum, mul(a, q1)), n);
        a = where_more(b, nought, mul(sub(qt, mul(nought, q1)), inverse(q2)), a), b = smaller(b, nought);
        /* By how much the line lowers the sum of squares. */
        const vec by_slope = mul(a, sub(sub(add(qt, qt), mul(a, q2)), mul(add(b, b), q1)));
        vec lowered = add(by_slope, mul(b, sub(add(sum, sum), mul(n, b))));
        lowered = where_more(spread, zero, lowered, all(-2.0f));
        slope = where_more(lowered, best, a, slope), base = where_more(lowered, best, b, base);
        best = larger(lowered, best);
    }
    *scale = mul(slope, range), *minimum = smaller(add(mul(base, range), low), zero);
}

/* The whole numbers of a group on a line, where they are wanted; returns the sum of squares of what they miss. */
INLINE vec on_line(const vec *x, vec scale, vec minimum, vec *whole) {
    const vec times = inverse(scale);
    vec missed = all(0.0f);
    for (int i = 0; i < GROUP; i++) {
        const vec q = between(rounded(mul(sub(x[i], minimum), times)), 0, MOST);
        const vec by = sub(add(mul(q, scale), minimum), x[i]);
        if (whole) whole[i] = q;
        missed = add(missed, mul(by, by));
    }
    return missed;
}

/* Whole numbers with minima, of some groups of inputs whose scales and minima share units, or of one. */
static void lines(const Quantization *s, Columns *of, int64_t groups, int64_t group, int64_t unit, int *broken) {
    const vec zero = all(0.0f);
    for (int g = 0; g < groups; g++) nearest_line(of->x + g * GROUP, of->scales + g, of->minima + g);
    if (!s->units) {
        uint16_t *steps = s->data ? (uint16_t *)s->steps + group : 0, *minima = s->data ? (uint16_t *)s->minima + group : 0;
        of->scales[0] = halves(of->scales[0], steps, broken), of->minima[0] = halves(of->minima[0], minima, broken);
        on_line(of->x, of->scales[0], of->minima[0], of->whole);
        return;
    }
    vec most = zero, least = zero;
    for (int g = 0; g < groups; g++) most = larger(of->scales[g], most), least = smaller(of->minima[g], least);
    const vec a = halves(quotient(most, all(MOST_SCALE)), s->data ? (uint16_t *)s->units + unit : 0, broken);
    const vec b = halves(quotient(least, all(MOST_SCALE)), s->data ? (uint16_t *)s->minimum_units + unit : 0, broken);
    for (int g = 0; g < groups; g++) {
        const vec *x = of->x + g * GROUP;
        const vec near = rounded(mul(of->scales[g], inverse(a))), near_minimum = rounded(mul(of->minima[g], inverse(b)));
        vec best = all(INFINITY), scale = zero, minimum = zero;
        for (int i = -1; i <= 1; i++)
            for (int j = -1; j <= 1; j++) {
                const vec step = between(add(near, all((float)i)), 0, MOST_SCALE);
                const vec down = between(add(near_minimum, all((float)j)), 0, MOST_SCALE);
                const vec missed = on_line(x, mul(step, a), mul(down, b), 0);
                scale = where_more(best, missed, step, scale), minimum = where_more(best, missed, down, minimum);
                best = smaller(best, missed);
            }
        if (s->data) {
            put_steps(scale, (int8_t *)s->steps + group + g * PANEL);
            put_steps(minimum, (int8_t *)s->minima + group + g * PANEL);
        }
        of->scales[g] = mul(scale, a), of->minima[g] = mul(minimum, b);
        on_line(x, of->scales[g], of->minima[g], of->whole + g * GROUP);
    }
}

/* Stores whole numbers in a panel: those of its columns from `first` on, 0 or half of them. */
static void put_whole(const Quantization *s, const Columns *of, int64_t inputs, int first, uint8_t *to) {
    const float least = (float)(s->minima ? 0 : stored_least[s->storage]);
    float numbers[LANES];
    for (int64_t i = 0; i < inputs; i++) {
        uint8_t *quad = to + i / TOGETHER * panel_bytes(s->storage) * TOGETHER + i % TOGETHER;
        store(numbers, sub(of->whole[i], all(least)));
        for (int l = 0; l < LANES; l++) {
            const uint8_t code = (uint8_t)numbers[l];
            if (s->storage == BYTE) quad[(first + l) * TOGETHER] = code;
            else if (!first) quad[l * TOGETHER] = code;
            else quad[l * TOGETHER] |= (uint8_t)(code << 4);
        }
    }
}

/* What whole numbers stand for, by rows of all inputs; rows without a place are left out. */
static void put_floats(const Quantization *s, const void *const *rows, const Columns *of, int64_t inputs, float *to) {
    float numbers[LANES];
    for (int64_t i = 0; i < inputs; i++) {
        vec x = mul(of->whole[i], of->scales[i / GROUP]);
        if (s->minima) x = add(x, of->minima[i / GROUP]);
        store(numbers, x);
        for (int l = 0; l < LANES; l++)
            if (rows[l]) to[l * s->inputs + i] = numbers[l];
    }
}

static void quantize_panel(const Quantization *s, int64_t panel, int *broken) {
    Columns of;
    const int64_t together = s->units ? UNIT : GROUP;
    for (int first = 0; first < PANEL; first += LANES) {
        const void *const *rows = s->packed ? 0 : s->rows + panel * PANEL + first;
        for (int64_t i = 0; i < s->inputs; i += together) {
            const int64_t at = panel * s->inputs + i, group = at / GROUP * PANEL + first;
            if (s->packed) load_packed(s, panel, first, i, together, &of, broken);
            else load_columns(s, rows, i, together, &of, broken);
            if (s->minima) lines(s, &of, together / GROUP, group, at / UNIT * PANEL + first, broken);
            else largest(s, &of, s->data ? (uint16_t *)s->steps + group : 0, broken);
            if (s->data) put_whole(s, &of, together, first, (uint8_t *)s->data + at * panel_bytes(s->storage));
            else put_floats(s, rows, &of, together, s->floats + (panel * PANEL + first) * s->inputs + i);
        }
    }
}

static void quantize_panels(void *job_, int thread) {
    Job *job = job_;
    int broken = 0;
    (void)thread;
    for (int64_t panel; (panel = atomic_fetch_add(&job->next, 1)) < job->of->panels;) quantize_panel(job->of, panel, &broken);
    if (broken) atomic_store(&job->broken, 1);
}

/* Quantizes weights; returns whether one of them is infinite, no number, or too large for scales in float16. */
int quantize(const Quantization *s) {
    Job job = {s, 0, 0};
    together(quantize_panels, &job, (int)s->threads);
    return atomic_load(&job.broken);
}
