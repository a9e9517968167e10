/* Runs a pass: step after step, the tasks of each by whichever threads are there. See program.h for what a step is, and
 * docs/numerics.md for the order of every sum. Built once for each kind of processor; the caller takes the best build
 * that runs, and all give the same bits. */

#include <stdlib.h>

#include "../built.h"
#include "attend.h"
#include "experts.h"
#include "linear.h"
#include "pool.h"
#include "program.h"
#include "rowwise.h"
#include "score.h"

#define ROWS_A_TASK 4
#define MANY_ROWS_A_TASK 32 /* where there are many: keys of neighbouring rows share what threads cannot write together */
#define FEW_ROWS 8
#define MOST_PANELS 8
#define PANELS_A_BLOCK (BLOCK / PANEL)
#define ALIGNED 16 /* floats; rows are not a power of two apart, or caches would keep few of them */

/* For the caller to see that both mean the same structures. */
int step_bytes(void) { return sizeof(Step); }
int program_bytes(void) { return sizeof(Program); }
int pass_bytes(void) { return sizeof(Pass); }

typedef struct {
    atomic_int next; /* task */
    Tally done;
    int total; /* tasks of experts: set by the step that sorts the rows, as a thread may come late */
} Progress;

typedef struct {
    const Program *program;
    const Pass *pass;
    float **buffers;
    Progress *progress; /* of each step */
    float *scratch;
    int64_t room; /* floats of a thread's scratch */
    Lists *lists;
} Run;

static int64_t row_floats(int64_t width) { return (width + ALIGNED - 1) / ALIGNED * ALIGNED + ALIGNED; }

static int64_t stride_of(const Run *run, int64_t buffer) {
    return run->pass->given[buffer] ? run->program->widths[buffer] : row_floats(run->program->widths[buffer]);
}

static int64_t rows_of(const Step *s, const Pass *pass) { return s->wanted ? pass->wanted : pass->rows; }

/* Blocks of a row of logits. */
static int64_t blocks_of(const Step *s) { return (s->columns + BLOCK - 1) / BLOCK; }

static int64_t blocks_of_rows(int64_t rows) { return (rows + ROW_BLOCK - 1) / ROW_BLOCK; }

/* Tasks that the panels of a linear layer are shared among, for each block of rows. Where few rows leave most of the
 * time to memory, a thread reads long stretches of it: what it fetches ahead is its own then. Where there are many
 * rows, what is in the cache of them serves several panels. */
static int64_t shares_of(const Step *s, const Run *run, int64_t rows) {
    const int64_t panels = s->columns / PANEL, threads = run->pass->threads;
    if (rows > ROW_BLOCK) return (panels + PANELS_A_BLOCK - 1) / PANELS_A_BLOCK;
    const int64_t least = (panels + MOST_PANELS - 1) / MOST_PANELS, even = (least + threads - 1) / threads * threads;
    const int64_t shares = even > 4 * threads ? even : 4 * threads;
    return rows > FEW_ROWS || shares > panels ? panels : shares;
}

static int64_t rows_a_task(int64_t rows, int64_t threads) {
    return rows < 2 * MANY_ROWS_A_TASK * threads ? ROWS_A_TASK : MANY_ROWS_A_TASK;
}

static int64_t tasks_of(const Step *s, const Run *run) {
    const Pass *pass = run->pass;
    const int64_t rows = rows_of(s, pass);
    if (s->kind == LINEAR && s->experts) return run->progress[s - run->program->steps].total;
    if (s->kind == SORT) return 1;
    if (s->kind == ATTEND) return pass->pieces * s->kv_heads;
    if (s->kind == LINEAR) return blocks_of_rows(rows) * (s->scored ? blocks_of(s) : shares_of(s, run, rows));
    const int64_t each = rows_a_task(rows, pass->threads);
    return (rows + each - 1) / each;
}

/* What becomes of a row's sums of a panel: `width` entries, the rest is padding. */
INLINE void finish(const Step *s, const float *sums, int64_t panel, int64_t width, float *to) {
    for (int64_t c = 0; c < (s->gated ? PANEL / 2 : PANEL); c += LANES) {
        const int64_t left = width - c;
        if (left <= 0) break;
        vec x = load(sums + c);
        if (s->bias) x = add(x, load(s->bias + panel * PANEL + c));
        x = activated(s->variant, x);
        if (s->gated) {
            vec up = load(sums + LANES);
            if (s->bias) up = add(up, load(s->bias + panel * PANEL + LANES));
            x = mul(x, up);
        }
        if (s->softcap) {
            if (s->factor != 1.0) x = mul(x, all((float)s->factor));
            const vec cap = all((float)s->softcap);
            store_some(to + c, mul(tangent(quotient(x, cap)), cap), left);
        } else
            put(s, to + c, x, left);
    }
}

/* The rows of a block: blocks of a pass are about alike. */
typedef struct {
    int64_t first, count;
} Block;

static Block block_of(int64_t rows, int64_t block) {
    const int64_t blocks = blocks_of_rows(rows), first = rows * block / blocks;
    return (Block){first, rows * (block + 1) / blocks - first};
}

/* Some panels for a block of rows. */
static void linear_task(const Step *s, const Run *run, int64_t task, float *sums) {
    const int64_t panels = s->columns / PANEL, rows = rows_of(s, run->pass), shares = shares_of(s, run, rows);
    const int64_t share = task % shares, end = panels * (share + 1) / shares, together = rows > ROW_BLOCK ? PANELS_A_BLOCK : 1;
    const Block block = block_of(rows, task / shares);
    const int64_t x_row = stride_of(run, s->from), to_row = stride_of(run, s->to);
    const Linear linear = {s->weight, s->scales, s->bias, s->columns, s->inputs, s->storage};
    const float *x = run->buffers[s->from] + block.first * x_row + s->from_at;
    for (int64_t panel = panels * share / shares, some; panel < end; panel += some) {
        some = end - panel < together ? end - panel : together;
        products(&linear, panel, some, x, x_row, block.count, sums, some * PANEL);
        for (int64_t p = 0; p < some; p++) {
            const int64_t at = (panel + p) * (s->gated ? PANEL / 2 : PANEL);
            const int64_t width = run->program->widths[s->to] - s->to_at - at;
            float *to = run->buffers[s->to] + block.first * to_row + s->to_at + at;
            for (int64_t r = 0; r < block.count; r++)
                finish(s, sums + (r * some + p) * PANEL, panel + p, width, to + r * to_row);
        }
    }
}

/* A block of logits for a block of rows. What SCORE needs of them is stored: tops, nexts, totals and places of the
 * blocks of a row. */
static void score_task(const Step *s, const Run *run, int64_t task, float *sums) {
    const int64_t blocks = blocks_of(s), block = task % blocks, panel = block * PANELS_A_BLOCK;
    const int64_t left = s->columns / PANEL - panel, some = left < PANELS_A_BLOCK ? left : PANELS_A_BLOCK;
    const Block rows = block_of(rows_of(s, run->pass), task / blocks);
    const int64_t x_row = stride_of(run, s->from), to_row = stride_of(run, s->to);
    const Linear linear = {s->weight, s->scales, s->bias, s->columns, s->inputs, s->storage};
    products(&linear, panel, some, run->buffers[s->from] + rows.first * x_row + s->from_at, x_row, rows.count, sums, BLOCK);
    for (int64_t r = 0; r < rows.count; r++, sums += BLOCK) {
        for (int64_t p = 0; p < PANELS_A_BLOCK; p++) {
            const int64_t width = s->scored - (panel + p) * PANEL;
            float *at = sums + p * PANEL;
            if (width > 0) finish(s, at, panel + p, width, at);
            for (int64_t c = width > 0 ? width : 0; c < PANEL; c++) at[c] = -INFINITY;
        }
        float *to = run->buffers[s->to] + (rows.first + r) * to_row + block;
        const Peak peak = peak_of_block(sums);
        to[0] = peak.top, to[blocks] = peak.next, to[2 * blocks] = peak.total;
        memcpy(to + 3 * blocks, &peak.at, sizeof(float));
    }
}

/* A panel of an expert, for all rows that take it. */
static void expert_task(const Step *s, const Run *run, int64_t task, float *sums) {
    const int64_t panels = s->columns / PANEL, panel = task % panels, place = task / panels;
    const int64_t x_row = stride_of(run, s->from), to_row = stride_of(run, s->to), expert = run->lists->experts[place];
    const int64_t entries = s->columns * s->inputs, bytes = entries / PANEL * panel_bytes(s->storage);
    const float *scales = s->scales ? s->scales + expert * entries / GROUP : 0;
    const Linear linear = {(const char *)s->weight + expert * bytes, scales, 0, s->columns, s->inputs, s->storage};
    const int64_t last = run->lists->firsts[place + 1], at = panel * (s->gated ? PANEL / 2 : PANEL);
    float *rows = sums + ROW_BLOCK * PANEL;
    for (int64_t first = run->lists->firsts[place], count; first < last; first += count) {
        const int32_t *items = run->lists->items + first;
        count = last - first < ROW_BLOCK ? last - first : ROW_BLOCK;
        for (int64_t r = 0; r < count; r++)
            memcpy(rows + r * s->inputs,
                   run->buffers[s->from] + items[r] / s->picks * x_row + items[r] % s->picks * s->from_step,
                   sizeof(float) * s->inputs);
        products(&linear, panel, 1, rows, s->inputs, count, sums, PANEL);
        for (int64_t r = 0; r < count; r++)
            finish(s, sums + r * PANEL, panel, s->to_step - at,
                   run->buffers[s->to] + items[r] / s->picks * to_row + items[r] % s->picks * s->to_step + at);
    }
}

/* The largest logit of a row, the next, the logarithm of the sum of e^(x - largest), and the largest one's place. */
static void score_row(const Step *s, const float *x, float *to) {
    const int64_t blocks = s->inputs;
    const Peak peak = peak_of_row(x, x + blocks, x + 2 * blocks, x + 3 * blocks, blocks);
    to[0] = peak.top, to[1] = peak.next, to[2] = log_of(peak.total);
    memcpy(to + 3, &peak.at, sizeof peak.at);
}

static void row_task(const Step *s, const Run *run, int64_t row) {
    const Pass *pass = run->pass;
    float *to = run->buffers[s->to] + row * stride_of(run, s->to) + s->to_at;
    if (s->kind == EMBED) {
        embed(s, s->variant ? pass->positions[row] + s->offset : pass->ids[row], to);
        return;
    }
    const int64_t from = s->kind == COPY && s->variant == 1 ? pass->want[row] : row;
    float *x = run->buffers[s->from] + from * stride_of(run, s->from) + s->from_at;
    if (s->kind == NORM)
        for (int64_t i = 0; i < s->inputs; i++)
            norm(s, x + i * s->columns, s->weight ? (const float *)s->weight + i * s->weight_step : 0,
                 s->bias ? s->bias + i * s->weight_step : 0, to + i * s->columns);
    else if (s->kind == COPY)
        copy_row(s, x, s->variant == 2 ? run->buffers[s->routes] + row * stride_of(run, s->routes) : 0, to);
    else if (s->kind == ROUTE)
        route(s, x, to);
    else if (s->kind == SCORE)
        score_row(s, x, to);
    else if (s->kind == ACTIVATE)
        activate(s, x, to);
    else if (s->kind == SOFTMAX)
        softmax(x, s->columns, to);
    else if (s->kind == SUM)
        *to = sum(x, s->columns);
    else if (s->kind == COMBINE)
        combine(s, x, run->buffers[s->routes] + row * stride_of(run, s->routes), to);
    else if (!rotate_row(s, pass, row, x) && s->last)
        pass->broken[row] = 1;
}

static void task_of(const Step *s, const Run *run, int64_t task, float *scratch) {
    if (s->kind == LINEAR)
        (s->experts ? expert_task : s->scored ? score_task : linear_task)(s, run, task, scratch);
    else if (s->kind == SORT) {
        sort_rows(s, run->buffers[s->from], stride_of(run, s->from), rows_of(s, run->pass), run->lists);
        const Step *last = run->program->steps + run->program->count;
        for (const Step *other = s + 1; other < last && other->kind != SORT; other++)
            if (other->kind == LINEAR && other->experts)
                run->progress[other - run->program->steps].total = run->lists->hit * (int)(other->columns / PANEL);
    }
    else if (s->kind == ATTEND)
        attend(s, run->pass, run->pass->piece + task / s->kv_heads, task % s->kv_heads, run->buffers[s->from] + s->from_at,
               stride_of(run, s->from), run->buffers[s->to] + s->to_at, stride_of(run, s->to), scratch);
    else {
        const int64_t rows = rows_of(s, run->pass), each = rows_a_task(rows, run->pass->threads), end = (task + 1) * each;
        for (int64_t row = task * each; row < (end < rows ? end : rows); row++) row_task(s, run, row);
    }
}

static void work(void *of, int thread) {
    const Run *run = of;
    float *scratch = run->scratch + thread * run->room;
    for (int64_t i = 0; i < run->program->count; i++) {
        const Step *s = run->program->steps + i;
        Progress *progress = run->progress + i;
        const int total = (int)tasks_of(s, run);
        for (int task; (task = atomic_fetch_add(&progress->next, 1)) < total;) {
            task_of(s, run, task, scratch);
            tally(&progress->done, total);
        }
        await(&progress->done, total);
    }
}

/* Memory of the passes of a thread, kept from one to the next. */
static __thread char *kept;
static __thread int64_t kept_bytes;

static char *memory(int64_t bytes) {
    if (bytes > kept_bytes) {
        free(kept);
        kept_bytes = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        kept = aligned_alloc(4096, kept_bytes);
        if (!kept) kept_bytes = 0;
    }
    return kept;
}

/* 0, or 1 if there is no memory. */
int run_pass(const Program *program, const Pass *pass) {
    int threads = pass->threads < 1 ? 1 : pass->threads < MOST_THREADS ? (int)pass->threads : MOST_THREADS;
    int64_t room = ROW_BLOCK * BLOCK, floats = 0, experts = 0, picks = 0;
    for (int64_t i = 0; i < program->count; i++) {
        const Step *s = program->steps + i;
        int64_t needed = s->experts ? ROW_BLOCK * (PANEL + s->inputs) : 0;
        experts = s->experts > experts ? s->experts : experts;
        picks = s->picks > picks ? s->picks : picks;
        for (int64_t j = 0; s->kind == ATTEND && j < pass->pieces; j++) {
            int64_t wanted = attend_room(s, pass->piece + j);
            needed = wanted > needed ? wanted : needed;
        }
        room = needed > room ? needed : room;
    }
    room = row_floats(room);
    for (int64_t i = 0; i < program->buffers; i++)
        if (!pass->given[i]) floats += pass->rows * row_floats(program->widths[i]);
    const int64_t pointers = sizeof(float *) * program->buffers, marks = sizeof(Progress) * program->count;
    const int64_t listed = sizeof(int32_t) * (2 * experts + 1 + pass->rows * picks);
    char *all = memory(sizeof(float) * (floats + threads * room) + pointers + marks + listed + 64);
    if (!all) return 1;
    Lists lists = {0};
    Run run = {program, pass, 0, 0, 0, room, &lists};
    float *at = (float *)all;
    run.scratch = at + floats;
    run.buffers = (float **)(run.scratch + threads * room);
    run.progress = (Progress *)((char *)run.buffers + pointers);
    memset((void *)run.progress, 0, marks);
    lists.experts = (int32_t *)((char *)run.progress + marks);
    lists.firsts = lists.experts + experts;
    lists.items = lists.firsts + experts + 1;
    for (int64_t i = 0; i < program->buffers; i++) {
        run.buffers[i] = pass->given[i];
        if (run.buffers[i]) continue;
        run.buffers[i] = at;
        at += pass->rows * row_floats(program->widths[i]);
    }
    together(work, &run, threads);
    return 0;
}
