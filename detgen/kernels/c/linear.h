/* Linear layers: y[column] = x[0] * w[0][column] + x[1] * w[1][column] + ..., one fused multiply-add after the other
 * from zero, in parts of 128 inputs; the sums of eight parts are added in their order, then those of such sections, then
 * the bias. Vectors run over the columns,
 * tiles over the rows, and neither has a say in the order. */

#ifndef DETGEN_LINEAR
#define DETGEN_LINEAR

#include "cores.h"

#define ROW_BLOCK 96 /* rows that read a panel while it is in the cache */

/* The most rows of a tile, by its registers of columns: as many as the sums have registers. */
#if WIDTH == 16
#define TILE_ROWS 12
#define NARROW 2 /* registers of columns in tiles of many rows */
#define FEW 0    /* rows up to which a tile has all columns of a panel instead */
#elif WIDTH == 8
#define TILE_ROWS 6
#define NARROW 2
#define FEW 2
#else
#define TILE_ROWS 4
#define NARROW 4
#define FEW 2
#endif
#define WHOLE (PANEL / WIDTH)
#define NEAR 3 /* rows that are addressed from one register: at it, and one and two strides behind it */
#define WIDENED 3 /* tiles of rows from which weights in few bits are made floats once for all of them */

/* Memory would rest while the tiles of many rows read a part again and again: lines behind it are fetched meanwhile, for
 * each STRIDE inputs the same number, from NEAREST bytes away on. */
#define LINE 64
#define STRIDE 4
#define NEAREST 4096

/* Sums of `rows` rows and `wide` registers of columns, from column `from` on, over a part of the inputs, counted by
 * `unit_of` them. */
INLINE void tile(
    const int rows, const int wide, const int storage, int from, const char *panel, const float *scales,
    const float *codes, const float *x, int64_t x_row, int64_t inputs, float *sums, int64_t sums_row, int64_t add_to, const char *next, int64_t lines) {
    const int64_t bytes = panel_bytes(storage) * unit_of(storage);
    const int turn = turn_of(storage);
    const float *at[(TILE_ROWS + NEAR - 1) / NEAR];
#define EACH_NEAR _Pragma("GCC unroll 4") for (int n = 0; n * NEAR < rows; n++)
    EACH_NEAR at[n] = x + n * NEAR * x_row;
    reg all[TILE_ROWS][WHOLE];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int c = 0; c < wide; c++) all[r][c] = reg_all(0.0f);
    for (int64_t group = 0; group < inputs; group += GROUP) {
        const int64_t end = inputs - group < GROUP ? inputs : group + GROUP;
        reg scale[WHOLE];
        if (storage >= CODE)
#pragma GCC unroll 16
            for (int c = 0; c < wide; c++) scale[c] = reg_load(scales + group / GROUP * PANEL + from + c * WIDTH);
        for (int64_t i = group; i < end; i += turn) {
            EACH_NEAR __asm__("" : "+r"(at[n])); /* in a register */
            if (i % STRIDE == 0)
                for (int64_t l = 0; l < lines; l++, next += LINE) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 2
            for (int odd = turn; odd-- > 0;) {
                reg w[WHOLE];
#pragma GCC unroll 16
                for (int c = 0; c < wide; c++) {
                    const int at = from + c * WIDTH;
                    w[c] = storage == PAIR ? reg_pairs(panel + i * bytes + at * 4, odd)
                                           : weights(storage, panel + i * bytes, at, codes);
                    if (storage >= CODE) w[c] = w[c] * scale[c];
                }
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++) {
                    reg b = reg_all(at[r / NEAR][r % NEAR * x_row + odd]);
#pragma GCC unroll 16
                    for (int c = 0; c < wide; c++)
                        all[r][c] = storage == PAIR ? pair_fma(w[c], b, all[r][c]) : reg_fma(w[c], b, all[r][c]);
                }
            }
            EACH_NEAR at[n] += turn;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int c = 0; c < wide; c++) {
            float *to = sums + r * sums_row + from + c * WIDTH;
            if (add_to) all[r][c] = reg_load(to) + all[r][c];
            reg_store(to, all[r][c]);
        }
#undef EACH_NEAR
}

/* One part of the inputs of one panel, for a block of rows; meanwhile `lines` cache lines for each STRIDE inputs are
 * fetched from `next` on. */
INLINE void part(
    const int storage, const char *panel, const float *scales, const float *codes, const float *x, int64_t x_row,
    int64_t rows, int64_t inputs, float *sums, int64_t sums_row, int64_t add_to, const char *next, int64_t lines) {
    for (int64_t r = 0; r < rows;) {
        int64_t left = rows - r, tiles = (left + TILE_ROWS - 1) / TILE_ROWS, step = (left + tiles - 1) / tiles;
#define TILE(R, C, c) \
    { \
        tile(R, C, storage, (c) * WIDTH, panel, scales, codes, x + r * x_row, x_row, inputs, sums + r * sums_row, \
             sums_row, add_to, next, lines); \
        next += (inputs + STRIDE - 1) / STRIDE * lines * LINE; \
    }
#define ROWS(R) \
    case R: \
        if (R <= FEW) TILE(R, WHOLE, 0) \
        else \
            for (int c = 0; c < WHOLE; c += NARROW) TILE(R, NARROW, c) \
        break;
        switch (step) {
            ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if TILE_ROWS > 4
            ROWS(5) ROWS(6)
#endif
#if TILE_ROWS > 6
            ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
        }
        r += step;
    }
#undef ROWS
#undef TILE
}

/* The weights of a part as floats, which `lines` cache lines for each STRIDE inputs from `next` on are fetched for. */
INLINE void widen(
    const int storage, const char *panel, const float *scales, const float *codes, int64_t inputs, float *to,
    const char *next, int64_t lines) {
    for (int64_t i = 0; i < inputs; i++) {
        if (i % STRIDE == 0)
            for (int64_t l = 0; l < lines; l++, next += LINE) __builtin_prefetch(next, 0, 2);
        for (int c = 0; c < PANEL; c += WIDTH) {
            reg w = weights(storage, panel + i * panel_bytes(storage), c, codes);
            if (storage >= CODE) w = w * reg_load(scales + i / GROUP * PANEL + c);
            reg_store(to + i * PANEL + c, w);
        }
    }
}

/* One part of the inputs of one panel, for a block of rows. What is read next, at `next`, is fetched meanwhile. */
static void piece(
    const Weight *weight, int64_t panel, int64_t first, const float *x, int64_t x_row, int64_t rows, float *sums,
    int64_t sums_row, const char *next) {
    const int64_t unit = unit_of(weight->storage), bytes = panel_bytes(weight->storage) * unit;
    const int64_t left = weight->inputs - first, inputs = (left < PART_INPUTS ? left : PART_INPUTS) / unit;
    const int64_t adds = first % SECTION, at = panel * weight->inputs + first;
    const char *w = (const char *)weight->data + at / unit * bytes;
    x += first / unit;
    const float *s = weight->storage == CODE ? (const float *)weight->scales.steps + at / GROUP * PANEL : 0;
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, calls = rows <= FEW ? 1 : tiles * (WHOLE / NARROW);
    const int64_t lines = (STRIDE * bytes + LINE - 1) / LINE, shared = (lines + calls - 1) / calls;
#define STORED(KIND) \
    case KIND: \
        if (KIND < CODE || tiles < WIDENED) \
            part(KIND, w, s, weight->codes, x, x_row, rows, inputs, sums, sums_row, adds, next, shared); \
        else { \
            float wide[PART_INPUTS * PANEL] __attribute__((aligned(64))); \
            widen(KIND, w, s, weight->codes, inputs, wide, next, lines); \
            part(FLOAT, (const char *)wide, 0, 0, x, x_row, rows, inputs, sums, sums_row, adds, 0, 0); \
        } \
        break;
#define CORE(KIND, BITS, AT_ONCE) \
    case KIND: core_part(BITS, AT_ONCE, w, x, x_row, rows, inputs * unit, sums, sums_row, adds); break;
    switch (weight->storage) { WIDENED_STORAGES(STORED) CORE_STORAGES(CORE) }
#undef STORED
#undef CORE
}

/* Adds sums to those of the sections before, or takes them from there at the end: a + b has the bits of b + a. */
static void add_section(float *to, const float *from, int64_t floats, int64_t first) {
    for (int64_t i = 0; i < floats; i += LANES) store(to + i, first ? load(from + i) : add(load(to + i), load(from + i)));
}

/* The sums of some panels for some rows, without the bias: x is [rows, inputs], sums [rows, panels, PANEL], and
 * as many floats behind them; their rows `x_row` and `sums_row` apart. A part of the rows serves all of the panels while
 * it is in the cache. */
static void products(
    const Weight *weight, int64_t panel, int64_t panels, const float *x, int64_t x_row, int64_t rows, float *sums,
    int64_t sums_row) {
    const int64_t floats = rows * sums_row;
    const int64_t bytes = panel_bytes(weight->storage), all = weight->inputs * bytes;
    int64_t ahead = PART_INPUTS * bytes < NEAREST ? NEAREST : PART_INPUTS * bytes;
    if (rows <= 2) ahead = AHEAD; /* one tile reads, about as fast as memory gives */
    else if (unit_of(weight->storage) > 1 && rows <= TILE_ROWS) ahead = NEAREST;
    for (int64_t first = 0; first < weight->inputs; first += PART_INPUTS) {
        if (first && first % SECTION == 0) add_section(sums + floats, sums, floats, first == SECTION);
        for (int64_t p = 0; p < panels; p++) {
            const char *w = (const char *)weight->data + (panel + p) * all + first * bytes;
            const char *next = p + 1 < panels ? w + all : w - p * all + ahead;
            piece(weight, panel + p, first, x, x_row, rows, sums + p * PANEL, sums_row, next);
        }
    }
    if (weight->inputs > SECTION) add_section(sums, sums + floats, floats, 0);
}

/* The same of inputs that are rounded to bf16. */
static void pair_products(
    const Weight *weight, int64_t panel, int64_t panels, Rounded x, int64_t rows, float *sums, int64_t sums_row) {
    products(weight, panel, panels, (const float *)x.entries, x.row / (int64_t)sizeof(float), rows, sums, sums_row);
}

#endif
