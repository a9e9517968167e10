/* Weights as they are, and their scales, from rows into panels (panels.py). Of each column 64 bytes are read at a time:
 * rows may be a multiple of a cache's size apart, where single numbers of all columns would drive each other out. */

#include <stdatomic.h>
#include <string.h>

#include "few_bits.h"
#include "pool.h"

#define BLOCK 64           /* bytes of a column */
#define SMALLEST_BF16 9216 /* 2^-55, the smallest number in a pair (SMALLEST of storage.py) */

typedef struct {
    const Arrangement *of;
    atomic_int next;
} Job;

typedef union {
    uint8_t bytes[PANEL][BLOCK];
    uint16_t words[PANEL][BLOCK / 2];
    uint32_t numbers[PANEL][BLOCK / 4];
    uint32_t quads[PANEL][BLOCK / TOGETHER];
} Room;

/* Some inputs of all columns; 0 where there is none. */
static void take(const Arrangement *s, const void *const *rows, int64_t first, int64_t inputs, Room *room) {
    for (int c = 0; c < PANEL; c++) {
        if (!rows[c] || inputs * s->width < BLOCK) memset(room->bytes[c], 0, BLOCK);
        if (rows[c]) memcpy(room->bytes[c], (const char *)rows[c] + first * s->width, (size_t)(inputs * s->width));
    }
}

static void put_numbers(const Room *room, int64_t inputs, uint32_t *to) {
    for (int64_t i = 0; i < inputs; i++, to += PANEL)
        for (int c = 0; c < PANEL; c++) to[c] = room->numbers[c][i];
}

static void put_words(const Room *room, int64_t inputs, uint16_t *to) {
    for (int64_t i = 0; i < inputs; i++, to += PANEL)
        for (int c = 0; c < PANEL; c++) to[c] = room->words[c][i];
}

static void put_bytes(const Room *room, int64_t inputs, uint8_t *to) {
    for (int64_t i = 0; i < inputs; i++, to += PANEL)
        for (int c = 0; c < PANEL; c++) to[c] = room->bytes[c][i];
}

/* In bf16, two of a column side by side. */
static void put_pairs(const Room *room, int64_t inputs, uint32_t *to) {
    for (int64_t i = 0; i < inputs / 2; i++, to += PANEL)
        for (int c = 0; c < PANEL; c++) {
            const uint32_t two = room->numbers[c][i];
            const uint32_t even = (two & 0x7fff) < SMALLEST_BF16 ? 0 : two & 0xffff;
            const uint32_t odd = (two >> 16 & 0x7fff) < SMALLEST_BF16 ? 0 : two & 0xffff0000;
            to[c] = even | odd;
        }
}

/* One plane of so many codes: parts of them, as many as fit a byte, from bit `first` on. */
INLINE void put_plane(const uint8_t *codes, const int count, const int bits, int first, uint8_t *to) {
    const int size = count * bits / 8;
    const uint8_t mask = (uint8_t)((1 << bits) - 1);
    uint8_t found[QUAD];
    for (int j = 0; j < size; j++) found[j] = codes[j] >> first & mask;
    for (int at = 1; at < 8 / bits; at++)
        for (int j = 0; j < size; j++) found[j] |= (uint8_t)((codes[at * size + j] >> first & mask) << bits * at);
    memcpy(to, found, (size_t)size);
}

/* The codes of some inputs that stand together, QUAD or PANEL of them; returns what comes behind them. */
INLINE uint8_t *put_codes(const Arrangement *s, const int count, uint8_t *codes, uint8_t *to) {
    if (s->table)
        for (int j = 0; j < count; j++) codes[j] = s->table[codes[j]];
    else
        for (int j = 0; j < count; j++) codes[j] = (uint8_t)(codes[j] - s->least);
    if (s->low == 8) memcpy(to, codes, count);
    else if (s->low == 4) put_plane(codes, count, 4, 0, to);
    else put_plane(codes, count, 2, 0, to);
    to += s->low * count / 8;
    if (s->high == 1) put_plane(codes, count, 1, (int)s->low, to);
    else if (s->high) put_plane(codes, count, 2, (int)s->low, to);
    return to + s->high * count / 8;
}

static void put_whole(const Arrangement *s, const Room *room, int64_t inputs, uint8_t *to) {
    uint32_t quad[PANEL];
    uint8_t codes[QUAD];
    if (s->together == TOGETHER)
        for (int64_t i = 0; i < inputs / TOGETHER; i++) {
            for (int c = 0; c < PANEL; c++) quad[c] = room->quads[c][i];
            memcpy(codes, quad, sizeof codes);
            to = put_codes(s, QUAD, codes, to);
        }
    else
        for (int64_t i = 0; i < inputs; i++) {
            for (int c = 0; c < PANEL; c++) codes[c] = room->bytes[c][i];
            to = put_codes(s, PANEL, codes, to);
        }
}

static void arrange_panel(const Arrangement *s, int64_t panel) {
    const void *const *rows = s->rows + panel * PANEL;
    const int64_t block = BLOCK / s->width, bits = s->low ? s->low + s->high : 8 * s->width;
    Room room;
    for (int64_t first = 0; first < s->inputs; first += block) {
        const int64_t inputs = s->inputs - first < block ? s->inputs - first : block;
        void *to = (uint8_t *)s->data + (panel * s->inputs + first) * PANEL * bits / 8;
        take(s, rows, first, inputs, &room);
        if (s->low) put_whole(s, &room, inputs, to);
        else if (s->together == 2) put_pairs(&room, inputs, to);
        else if (s->width == 4) put_numbers(&room, inputs, to);
        else if (s->width == 2) put_words(&room, inputs, to);
        else put_bytes(&room, inputs, to);
    }
}

static void arrange_panels(void *job_, int thread) {
    Job *job = job_;
    (void)thread;
    for (int64_t panel; (panel = atomic_fetch_add(&job->next, 1)) < job->of->panels;) arrange_panel(job->of, panel);
}

void arrange(const Arrangement *s) {
    Job job = {s, 0};
    together(arrange_panels, &job, (int)s->threads);
}
