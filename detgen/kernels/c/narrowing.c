/* Weights once more in 8 bits: of each group of inputs, whole numbers up to 127 and a scale in float16. By these a model
 * drafts for itself, so nothing rests on their bits. */

#include "layout.h"
#include "pool.h"
#include "stored.h"

#define QUAD 4 /* inputs whose weights of a column stand together */

/* A group of a panel as floats, [GROUP, PANEL]. */
static void group_floats(int64_t storage, const char *data, float *to) {
    if (storage == PAIR)
        for (int64_t i = 0; i < GROUP * PANEL / 2; i++) {
            uint32_t pair;
            memcpy(&pair, data + 4 * i, sizeof pair);
            const int64_t at = i / PANEL * 2 * PANEL + i % PANEL;
            to[at] = as_float(pair << 16), to[at + PANEL] = as_float(pair & 0xffff0000);
        }
    else
        for (int64_t i = 0; i < GROUP; i++, data += panel_bytes(storage))
            for (int c = 0; c < PANEL; c += WIDTH) {
                const reg w = storage == FLOAT    ? weights(FLOAT, data, c, 0)
                              : storage == BFLOAT ? weights(BFLOAT, data, c, 0)
                                                  : weights(HALF, data, c, 0);
                reg_store(to + i * PANEL + c, w);
            }
}

/* The bits of the least float16 number that is not below x, which is neither negative nor too large for it. */
static uint16_t half_above(float x) {
    float scaled = x * 0x1p-112f; /* float16's exponents, as if they were float32's */
    uint32_t bits;
    memcpy(&bits, &scaled, sizeof bits);
    return (uint16_t)((bits + 0x1fff) >> 13);
}

static void narrow_group(const float *x, uint8_t *to, uint16_t *scales) {
    float most[PANEL] = {0}, factors[PANEL];
    for (int64_t i = 0; i < GROUP; i++)
        for (int64_t c = 0; c < PANEL; c++) {
            const float size = __builtin_fabsf(x[i * PANEL + c]);
            most[c] = size > most[c] ? size : most[c];
        }
    for (int64_t c = 0; c < PANEL; c++) {
        const float scale = most[c] / 127.0f;
        scales[c] = scale < 65504.0f ? half_above(scale) : 0x7bff;
    }
    for (int c = 0; c < PANEL; c += WIDTH) reg_store(factors + c, reg_half(scales + c));
    for (int64_t c = 0; c < PANEL; c++) factors[c] = factors[c] > 0.0f ? 1.0f / factors[c] : 0.0f;
    for (int64_t i = 0; i < GROUP; i++)
        for (int64_t c = 0; c < PANEL; c++) {
            const float whole = x[i * PANEL + c] * factors[c] + 12582912.0f; /* 1.5 * 2^23 rounds */
            uint32_t bits;
            memcpy(&bits, &whole, sizeof bits);
            to[(i / QUAD * PANEL + c) * QUAD + i % QUAD] = (uint8_t)(bits + 128);
        }
}

typedef struct {
    const Narrowing *of;
    atomic_int next;
} Narrowed;

static void narrow_panels(void *given, int thread) {
    Narrowed *all = given;
    const Narrowing *of = all->of;
    (void)thread;
    const int64_t groups = of->inputs / GROUP, bytes = panel_bytes(of->storage) * GROUP;
    for (int64_t panel; (panel = atomic_fetch_add(&all->next, 1)) < of->panels;)
        for (int64_t g = panel * groups; g < (panel + 1) * groups; g++) {
            float x[GROUP * PANEL] __attribute__((aligned(64)));
            group_floats(of->storage, (const char *)of->data + g * bytes, x);
            narrow_group(x, of->to + g * GROUP * PANEL, of->scales + g * PANEL);
        }
}

void narrow(const Narrowing *of) {
    Narrowed all = {of, 0};
    together(narrow_panels, &all, (int)of->threads);
}
