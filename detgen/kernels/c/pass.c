/* Runs a pass: step after step, the tasks of each by whichever threads are there. See detgen/program/steps.py for what a
 * step is, and docs/numerics.md for the order of every sum. Built once for each kind of processor; the caller takes the
 * best build that runs, and all give the same bits. */

#include <stdlib.h>

#include "../built.h"
#include "attend.h"
#include "experts.h"
#include "layout.h"
#include "linear.h"
#include "pool.h"
#include "rowwise.h"
#include "score.h"
#include "states.h"

#define ROWS_A_TASK 4
#define MANY_ROWS_A_TASK 32 /* where there are many: keys of neighbouring rows share what threads cannot write together */
#define FEW_ROWS 8
#define MOST_PANELS 8
#define PANELS_A_BLOCK (LOGIT_BLOCK / PANEL)
#define ALIGNED 16 /* floats; rows are not a power of two apart, or caches would keep few of them */

/* For the caller to see that both mean the same structures. */
int layout(void) { return LAYOUT; }

typedef struct {
    atomic_int next; /* task */
    Tally done;
    Tally rounded; /* tasks that round the inputs, which come first */
    int total; /* tasks of experts: set by the step that sorts the rows, as a thread may come late */
    AttendTasks attend; /* of that step */
} Progress;

typedef struct {
    const Program *program;
    const Pass *pass;
    float **buffers;
    Progress *progress; /* of each step */
    float *scratch;
    int64_t room; /* floats of a thread's scratch */
    Lists *lists;
    Rounded rounded; /* the inputs of a linear layer that rounds them */
    int64_t apart; /* rows of those of a thread, where each has its own */
    float *parts; /* of attention: see AttendMemory, like what follows */
    atomic_int *joined;
} Run;

static int64_t row_floats(int64_t width) { return (width + ALIGNED - 1) / ALIGNED * ALIGNED + ALIGNED; }

static int64_t stride_of(const Run *run, Buffer buffer) {
    return run->pass->given[buffer.number] ? buffer.width : row_floats(buffer.width);
}

static float *row_at(const Run *run, Buffer buffer, int64_t row) {
    return run->buffers[buffer.number] + row * stride_of(run, buffer);
}

static int64_t rows_of(const Step *s, const Pass *pass) { return s->wanted ? pass->wanted : pass->rows; }

/* Blocks of a row of logits. */
static int64_t blocks_of(const ScoredLinear *s) { return s->to.width / SCORED; }

static int64_t blocks_of_rows(int64_t rows) { return (rows + ROW_BLOCK - 1) / ROW_BLOCK; }

/* Tasks that the panels of a linear layer are shared among, for each block of rows. Where few rows leave most of the
 * time to memory, a thread reads long stretches of it: what it fetches ahead is its own then. Where there are many
 * rows, what is in the cache of them serves several panels. */
static int64_t shares_of(const Linear *s, const Run *run, int64_t rows) {
    const int64_t panels = s->weight.columns / PANEL, threads = run->pass->threads;
    if (rows > ROW_BLOCK) return (panels + PANELS_A_BLOCK - 1) / PANELS_A_BLOCK;
    const int64_t least = (panels + MOST_PANELS - 1) / MOST_PANELS, even = (least + threads - 1) / threads * threads;
    const int64_t shares = even > 4 * threads ? even : 4 * threads;
    return rows > FEW_ROWS || shares > panels ? panels : shares;
}

/* What a linear layer rounds of a row, as its storage wants it: of so many parts, what is behind the first entries. */
typedef struct {
    int64_t storage, parts, passed;
    Buffer x;
} Rounding;

static Rounding rounding_of(const Step *s) {
    switch (s->kind) {
    case LINEAR: return (Rounding){s->linear.weight.storage, 1, 0, s->linear.x};
    case HEAD_LINEAR: {
        const HeadLinear *h = &s->head_linear;
        return (Rounding){h->weight.storage, h->heads, h->passed, h->x};
    }
    case SCORED_LINEAR: return (Rounding){s->scored_linear.weight.storage, 1, 0, s->scored_linear.x};
    case EXPERT_LINEAR: return (Rounding){s->expert_linear.weight.storage, 1, 0, s->expert_linear.x};
    default: return (Rounding){FLOAT};
    }
}

/* Whether the step before has rounded what this one reads, in the same way, and has left it as it was. */
static int is_rounded(const Run *run, const Step *s, const Rounding *of) {
    const Step *before = s - 1;
    if (s == run->program->steps || before->kind != LINEAR || s->kind == HEAD_LINEAR) return 0;
    return rounding_for(before->linear.weight.storage) == rounding_for(of->storage) &&
           before->linear.x.number == of->x.number && before->wanted == s->wanted &&
           before->linear.to.buffer.number != of->x.number;
}

/* Tasks that the panels of a head are shared among. */
static int64_t shares_of_head(const HeadLinear *s, const Run *run) {
    const int64_t panels = s->weight.columns / PANEL, shares = (4 * run->pass->threads + s->heads - 1) / s->heads;
    return shares > panels ? panels : shares;
}

static int64_t rows_a_task(int64_t rows, int64_t threads) {
    return rows < 2 * MANY_ROWS_A_TASK * threads ? ROWS_A_TASK : MANY_ROWS_A_TASK;
}

static int64_t tasks_of(const Step *s, const Run *run) {
    const Pass *pass = run->pass;
    const int64_t rows = rows_of(s, pass);
    if (s->kind == EXPERT_LINEAR) return run->progress[s - run->program->steps].total;
    if (s->kind == SORT) return 1;
    if (s->kind == ATTEND) return run->progress[s - run->program->steps].attend.total;
    if (s->kind == CONVOLVE) return pass->spans * blocks_of_channels(&s->convolve);
    if (s->kind == DELTA_RULE) return recurrence_tasks(pass, rule_of(&s->delta_rule));
    if (s->kind == STATE_SPACE) return recurrence_tasks(pass, space_of(&s->state_space));
    if (s->kind == SELECTIVE_SCAN) return pass->spans * blocks_of_scan(&s->selective_scan);
    if (s->kind == LINEAR) return blocks_of_rows(rows) * shares_of(&s->linear, run, rows);
    if (s->kind == HEAD_LINEAR)
        return blocks_of_rows(rows) * s->head_linear.heads * shares_of_head(&s->head_linear, run);
    if (s->kind == SCORED_LINEAR) return blocks_of_rows(rows) * blocks_of(&s->scored_linear);
    const int64_t each = rows_a_task(rows, pass->threads);
    return (rows + each - 1) / each;
}

/* Rounded inputs from one of them on. */
static Rounded from_input(int64_t storage, Rounded x, int64_t input) {
    x.entries += input * rounded_bytes(storage);
    if (is_whole(storage)) x.scales += input / GROUP, x.sums += input / HALF_GROUP;
    return x;
}

static void round_rows(const Run *run, const Rounding *of, int64_t first, int64_t end) {
    const int64_t part = of->x.width / of->parts, inputs = part - of->passed;
    for (int64_t row = first; row < end; row++)
        for (int64_t p = 0; p < of->parts; p++) {
            const float *x = row_at(run, of->x, row) + p * part + of->passed;
            const Rounded to = from_input(of->storage, from_row(run->rounded, row), p * inputs);
            if (of->storage == PAIR) narrow_row(x, inputs, (Narrow *)to.entries);
            else if (is_core(of->storage)) narrow_words(x, inputs, (uint16_t *)to.entries);
            else round_row(x, inputs, to.entries, to.scales, to.sums);
        }
}

/* Inputs of a linear layer from a block of rows on, as they are, so far apart, or rounded. */
typedef struct {
    const float *entries;
    int64_t row;
    Rounded rounded;
} Inputs;

static Inputs inputs_of(const Run *run, Buffer x, int64_t row) {
    return (Inputs){row_at(run, x, row), stride_of(run, x), from_row(run->rounded, row)};
}

/* The sums of some panels for a block of rows, without the bias. */
static void panels_of(
    const Weight *weight, Inputs x, int64_t panel, int64_t panels, int64_t rows, float *sums, int64_t sums_row) {
    if (is_whole(weight->storage)) whole_products(weight, panel, panels, x.rounded, rows, sums, sums_row);
    else if (rounding_for(weight->storage)) pair_products(weight, panel, panels, x.rounded, rows, sums, sums_row);
    else products(weight, panel, panels, x.entries, x.row, rows, sums, sums_row);
}

/* What becomes of a linear layer's sums. */
typedef struct {
    const float *bias;
    int64_t activation, gated;
    double softcap;
    Into into;
    double limit, slope, shift; /* see ExpertLinear */
} Ending;

/* What becomes of a row's sums of a panel: `width` entries, the rest is padding. */
INLINE void finish(const Ending *e, const float *sums, int64_t panel, int64_t width, float *to) {
    for (int64_t c = 0; c < (e->gated ? PANEL / 2 : PANEL); c += LANES) {
        const int64_t left = width - c;
        if (left <= 0) break;
        vec x = load(sums + c);
        if (e->bias) x = add(x, load(e->bias + panel * PANEL + c));
        if (!e->limit) x = activated(e->activation, x);
        if (e->gated) {
            vec up = load(sums + LANES);
            if (e->bias) up = add(up, load(e->bias + panel * PANEL + LANES));
            if (e->limit) {
                const vec most = all((float)e->limit), least = all(-(float)e->limit);
                x = where_more(x, most, most, x);
                x = mul(x, sigmoid(mul(x, all((float)e->slope))));
                up = add(where_more(up, most, most, where_more(least, up, least, up)), all((float)e->shift));
            }
            x = mul(x, up);
        }
        if (e->softcap) {
            if (e->into.factor != 1.0) x = mul(x, all((float)e->into.factor));
            const vec cap = all((float)e->softcap);
            store_some(to + c, mul(tangent(quotient(x, cap)), cap), left);
        } else
            put(&e->into, to + c, x, left);
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

/* Some panels for a block of `all` rows. */
static void linear_task(const Linear *s, const Run *run, int64_t all, int64_t task, float *sums) {
    const int64_t panels = s->weight.columns / PANEL, shares = shares_of(s, run, all);
    const int64_t share = task % shares, end = panels * (share + 1) / shares, together = all > ROW_BLOCK ? PANELS_A_BLOCK : 1;
    const Block block = block_of(all, task / shares);
    const int64_t to_row = stride_of(run, s->to.buffer);
    const Ending ending = {s->weight.bias, s->activation, s->gated, s->softcap, s->to};
    for (int64_t panel = panels * share / shares, some; panel < end; panel += some) {
        some = end - panel < together ? end - panel : together;
        panels_of(&s->weight, inputs_of(run, s->x, block.first), panel, some, block.count, sums, some * PANEL);
        for (int64_t p = 0; p < some; p++) {
            const int64_t at = (panel + p) * (s->gated ? PANEL / 2 : PANEL);
            float *to = row_at(run, s->to.buffer, block.first) + s->at + at;
            for (int64_t r = 0; r < block.count; r++)
                finish(&ending, sums + (r * some + p) * PANEL, panel + p, s->weight.outputs - at, to + r * to_row);
        }
    }
}

/* Some panels of a head for a block of `all` rows; with the first ones, what is passed on. */
static void head_task(const HeadLinear *s, const Run *run, int64_t all, int64_t task, float *sums) {
    const Weight *weight = &s->weight;
    const int64_t panels = weight->columns / PANEL, shares = shares_of_head(s, run), share = task % shares;
    const int64_t head = task / shares % s->heads, end = panels * (share + 1) / shares;
    const int64_t together = all > ROW_BLOCK ? PANELS_A_BLOCK : 1, to_row = stride_of(run, s->to);
    const Block block = block_of(all, task / shares / s->heads);
    const Ending ending = {.into.factor = 1.0};
    Inputs x = inputs_of(run, s->x, block.first);
    x.entries += head * (s->passed + weight->inputs);
    x.rounded = from_input(weight->storage, x.rounded, head * weight->inputs);
    float *to = row_at(run, s->to, block.first) + head * (s->passed + weight->outputs);
    for (int64_t r = 0; r < block.count && !share; r++)
        memcpy(to + r * to_row, x.entries + r * x.row, sizeof(float) * s->passed);
    x.entries += s->passed, to += s->passed;
    for (int64_t panel = panels * share / shares, some; panel < end; panel += some) {
        some = end - panel < together ? end - panel : together;
        panels_of(weight, x, head * panels + panel, some, block.count, sums, some * PANEL);
        for (int64_t p = 0; p < some; p++) {
            const int64_t at = (panel + p) * PANEL;
            for (int64_t r = 0; r < block.count; r++)
                finish(&ending, sums + (r * some + p) * PANEL, 0, weight->outputs - at, to + r * to_row + at);
        }
    }
}

/* A block of logits for a block of `all` rows. What SCORE needs of them is stored: tops, nexts, totals and places of the
 * blocks of a row. */
static void score_task(const ScoredLinear *s, const Run *run, int64_t all, int64_t task, float *sums) {
    const int64_t blocks = blocks_of(s), block = task % blocks, panel = block * PANELS_A_BLOCK;
    const int64_t left = s->weight.columns / PANEL - panel, some = left < PANELS_A_BLOCK ? left : PANELS_A_BLOCK;
    const Block rows = block_of(all, task / blocks);
    const Ending ending = {s->weight.bias, NONE, 0, s->softcap, {.factor = s->factor}};
    panels_of(&s->weight, inputs_of(run, s->x, rows.first), panel, some, rows.count, sums, LOGIT_BLOCK);
    for (int64_t r = 0; r < rows.count; r++, sums += LOGIT_BLOCK) {
        for (int64_t p = 0; p < PANELS_A_BLOCK; p++) {
            const int64_t width = s->weight.outputs - (panel + p) * PANEL;
            float *at = sums + p * PANEL;
            if (width > 0) finish(&ending, at, panel + p, width, at);
            for (int64_t c = width > 0 ? width : 0; c < PANEL; c++) at[c] = -INFINITY;
        }
        float *to = row_at(run, s->to, rows.first + r) + block;
        const Peak peak = peak_of_block(sums);
        to[0] = peak.top, to[blocks] = peak.next, to[2 * blocks] = peak.total;
        memcpy(to + 3 * blocks, &peak.at, sizeof(float));
    }
}

/* Some inputs of a row. */
static void take_rounded(int64_t storage, Rounded to, Rounded from, int64_t first, int64_t inputs) {
    const int64_t bytes = rounded_bytes(storage);
    memcpy(to.entries, from.entries + first * bytes, inputs * bytes);
    if (!is_whole(storage)) return;
    memcpy(to.scales, from.scales + first / GROUP, sizeof(float) * inputs / GROUP);
    memcpy(to.sums, from.sums + first / HALF_GROUP, sizeof(int32_t) * inputs / HALF_GROUP);
}

/* A panel of an expert, for all rows that take it. */
static void expert_task(const ExpertLinear *s, const Run *run, int64_t task, float *sums) {
    const Weight *all = &s->weight;
    const int64_t panels = all->columns / PANEL, panel = task % panels, place = task / panels, picks = s->routes.width / 2;
    const int64_t expert = run->lists->experts[place], from_step = s->x.width > all->inputs ? all->inputs : 0;
    const float *bias = all->bias ? all->bias + expert * all->columns : 0;
    const Ending ending = {bias, s->activation, s->gated, 0, {.factor = 1.0}, s->limit, s->slope, s->shift};
    const int64_t last = run->lists->firsts[place + 1], at = panel * (s->gated ? PANEL / 2 : PANEL);
    float *rows = sums + 2 * ROW_BLOCK * PANEL;
    const Rounded some = {(int8_t *)rows, rows + ROW_BLOCK * all->inputs / TOGETHER,
                          (int32_t *)(rows + ROW_BLOCK * (all->inputs / TOGETHER + all->inputs / GROUP)),
                          all->inputs * rounded_bytes(all->storage), all->inputs / GROUP};
    for (int64_t first = run->lists->firsts[place], count; first < last; first += count) {
        const int32_t *items = run->lists->items + first;
        count = last - first < ROW_BLOCK ? last - first : ROW_BLOCK;
        for (int64_t r = 0; r < count; r++) {
            const int64_t row = items[r] / picks, at_input = items[r] % picks * from_step;
            if (rounding_for(all->storage))
                take_rounded(all->storage, from_row(some, r), from_row(run->rounded, row), at_input, all->inputs);
            else memcpy(rows + r * all->inputs, row_at(run, s->x, row) + at_input, sizeof(float) * all->inputs);
        }
        if (is_whole(all->storage)) whole_products(all, expert * panels + panel, 1, some, count, sums, PANEL);
        else if (rounding_for(all->storage)) pair_products(all, expert * panels + panel, 1, some, count, sums, PANEL);
        else products(all, expert * panels + panel, 1, rows, all->inputs, count, sums, PANEL);
        for (int64_t r = 0; r < count; r++)
            finish(&ending, sums + r * PANEL, panel, all->outputs - at,
                   row_at(run, s->to, items[r] / picks) + items[r] % picks * all->outputs + at);
    }
}

static void sort_task(const Step *s, const Run *run) {
    const Step *last = run->program->steps + run->program->count;
    const Buffer routes = s->sort.routes;
    sort_rows(&s->sort, row_at(run, routes, 0), stride_of(run, routes), rows_of(s, run->pass), run->lists);
    for (const Step *other = s + 1; other < last && other->kind != SORT; other++)
        if (other->kind == EXPERT_LINEAR) {
            const int panels = (int)(other->expert_linear.weight.columns / PANEL);
            run->progress[other - run->program->steps].total = run->lists->hit * panels;
        }
}

/* The largest logit of a row, the next, the logarithm of the sum of e^(x - largest), and the largest one's place. */
static void score_row(const float *x, int64_t blocks, float *to) {
    const Peak peak = peak_of_row(x, x + blocks, x + 2 * blocks, x + 3 * blocks, blocks);
    to[0] = peak.top, to[1] = peak.next, to[2] = log_of(peak.total);
    memcpy(to + 3, &peak.at, sizeof peak.at);
}

static void norm_row(const Norm *s, const float *x, float *to) {
    for (int64_t i = 0; i < s->vectors; i++) {
        const int64_t at = s->at + i * s->size, own = s->own ? i * s->size : 0;
        norm(s, x + at, s->weight ? s->weight + own : 0, s->bias ? s->bias + own : 0, to + at);
    }
}

static void row_task(const Step *s, const Run *run, int64_t row) {
    const Pass *pass = run->pass;
#define AT(BUFFER) row_at(run, BUFFER, row)
    switch (s->kind) {
    case EMBED: {
        const Embed *e = &s->embed;
        const int64_t id = e->known && pass->ids[row] >= e->known ? 0 : pass->ids[row];
        embed(e->table, e->storage, id, &e->to, AT(e->to.buffer));
        break;
    }
    case EMBED_COLUMN: {
        const EmbedColumn *e = &s->embed_column;
        (is_whole(e->weight.storage) ? embed_column : embed_floats)(&e->weight, pass->ids[row], &e->to, AT(e->to.buffer));
        break;
    }
    case EMBED_POSITIONS: {
        const EmbedPositions *e = &s->embed_positions;
        embed(e->table, e->storage, pass->positions[row] + e->offset, &e->to, AT(e->to.buffer));
        break;
    }
    case NORM: norm_row(&s->norm, AT(s->norm.x), AT(s->norm.to.buffer)); break;
    case ROTATE:
        if (!rotate_row(&s->rotate, pass, row, AT(s->rotate.qkv)) && s->rotate.last) pass->broken[row] = 1;
        break;
    case COPY: copy_row(&s->copy, AT(s->copy.x), AT(s->copy.to.buffer)); break;
    case TAKE:
        memcpy(AT(s->take.to), row_at(run, s->take.x, pass->want[row]), sizeof(float) * s->take.to.width);
        break;
    case GATE: gate_row(&s->gate, AT(s->gate.x), AT(s->gate.gates), AT(s->gate.to.buffer)); break;
    case ROUTE: route(&s->route, AT(s->route.x), AT(s->route.to)); break;
    case WEIGH: weigh(&s->weigh, AT(s->weigh.x), AT(s->weigh.routes), AT(s->weigh.to)); break;
    case COMBINE: combine(&s->combine, AT(s->combine.x), AT(s->combine.routes), AT(s->combine.to.buffer)); break;
    case SCORE: score_row(AT(s->score.x), s->score.x.width / SCORED, AT(s->score.to)); break;
    case ACTIVATE: activate(&s->activate, AT(s->activate.x), AT(s->activate.to.buffer)); break;
    case SOFTMAX: softmax(AT(s->softmax.x), s->softmax.x.width, AT(s->softmax.to)); break;
    case WATCH:
        if (!watch_row(&s->watch, AT(s->watch.x))) pass->broken[row] = 1;
        break;
    case SUM: *AT(s->sum.to) = sum(AT(s->sum.x), s->sum.x.width); break;
    case GAUSSIAN_TOP_K: gaussian_top_k(&s->gaussian_top_k, AT(s->gaussian_top_k.x), AT(s->gaussian_top_k.to)); break;
    case MIX: mix(&s->mix, AT(s->mix.x), AT(s->mix.coefficients), AT(s->mix.to.buffer)); break;
    case XIELU: xielu(&s->xielu, AT(s->xielu.x), AT(s->xielu.to)); break;
    }
#undef AT
}

static RowsOf rows_in(const Run *run, Buffer buffer) { return (RowsOf){row_at(run, buffer, 0), stride_of(run, buffer)}; }

static void recur(const Run *run, Recurrence s, int64_t task, float *state) {
    const RecurrenceMemory at = {rows_in(run, s.qkv), rows_in(run, s.decay), rows_in(run, s.strength), rows_in(run, s.to),
                                 state};
    recurrence_task(&s, run->pass, task, at);
}

static void task_of(const Step *s, const Run *run, int64_t task, float *scratch) {
    const Pass *pass = run->pass;
    const int64_t rows = rows_of(s, pass);
    switch (s->kind) {
    case LINEAR: linear_task(&s->linear, run, rows, task, scratch); break;
    case HEAD_LINEAR: head_task(&s->head_linear, run, rows, task, scratch); break;
    case SCORED_LINEAR: score_task(&s->scored_linear, run, rows, task, scratch); break;
    case EXPERT_LINEAR: expert_task(&s->expert_linear, run, task, scratch); break;
    case SORT: sort_task(s, run); break;
    case ATTEND: {
        const Attend *a = &s->attend;
        const AttendMemory at = {row_at(run, a->qkv, 0), row_at(run, a->to, 0), scratch, run->parts, run->joined,
                                 stride_of(run, a->qkv), stride_of(run, a->to)};
        attend_task(a, pass, run->progress[s - run->program->steps].attend, task, at);
        break;
    }
    case CONVOLVE: {
        const Convolve *c = &s->convolve;
        convolve_task(c, pass, task, rows_in(run, c->x), rows_in(run, c->to));
        break;
    }
    case DELTA_RULE: recur(run, rule_of(&s->delta_rule), task, scratch); break;
    case STATE_SPACE: recur(run, space_of(&s->state_space), task, scratch); break;
    case SELECTIVE_SCAN: {
        const SelectiveScan *a = &s->selective_scan;
        scan_task(a, pass, task, rows_in(run, a->x), rows_in(run, a->times), rows_in(run, a->kq), rows_in(run, a->to), scratch);
        break;
    }
    default: {
        const int64_t each = rows_a_task(rows, pass->threads), end = (task + 1) * each;
        for (int64_t row = task * each; row < (end < rows ? end : rows); row++) row_task(s, run, row);
    }
    }
}

static void work(void *of, int thread) {
    Run own = *(const Run *)of, *const run = &own;
    own.rounded = from_row(own.rounded, thread * own.apart);
    float *scratch = run->scratch + thread * run->room;
    for (int64_t i = 0; i < run->program->count; i++) {
        const Step *s = run->program->steps + i;
        Progress *progress = run->progress + i;
        const int64_t rows = rows_of(s, run->pass), each = rows_a_task(rows, run->pass->threads);
        const Rounding of = rounding_of(s);
        int rounded = rounding_for(of.storage) && (run->apart || !is_rounded(run, s, &of));
        const int rounding = rounded && !run->apart ? (int)((rows + each - 1) / each) : 0;
        const int total = rounding + (int)tasks_of(s, run);
        for (int task; (task = atomic_fetch_add(&progress->next, 1)) < total;) {
            if (task < rounding) {
                round_rows(run, &of, task * each, (task + 1) * each < rows ? (task + 1) * each : rows);
                tally(&progress->rounded, rounding);
            } else {
                if (rounding) await(&progress->rounded, rounding);
                else if (rounded) round_rows(run, &of, 0, rows), rounded = 0;
                task_of(s, run, task - rounding, scratch);
            }
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

/* What a pass needs: floats of a thread's scratch, of buffers, and of parts of attention; the most experts of a step and
 * picks of a row; numbers of tables of attention, and counts of its parts. */
typedef struct {
    int64_t room, floats, parts, whole, experts, picks, tables, counts; /* whole: bytes of the widest row that is rounded */
} Sizes;

static Sizes sizes_of(const Program *program, const Pass *pass) {
    Sizes size = {.room = 2 * ROW_BLOCK * LOGIT_BLOCK};
    const Attend *before = 0;
#define AT_LEAST(FIELD, N) size.FIELD = (N) > size.FIELD ? (N) : size.FIELD
    for (int64_t i = 0; i < program->count; i++) {
        const Step *s = program->steps + i;
        const Rounding rounded = rounding_of(s);
        if (rounding_for(rounded.storage)) AT_LEAST(whole, rounded.x.width * rounded_bytes(rounded.storage));
        if (s->kind == EXPERT_LINEAR) AT_LEAST(room, ROW_BLOCK * (2 * PANEL + s->expert_linear.weight.inputs));
        if (s->kind == SORT) AT_LEAST(experts, s->sort.experts);
        if (s->kind == SORT) AT_LEAST(picks, s->sort.routes.width / 2);
        if (s->kind == DELTA_RULE) AT_LEAST(room, s->delta_rule.size * VALUES_A_TASK);
        if (s->kind == STATE_SPACE) AT_LEAST(room, s->state_space.size * VALUES_A_TASK);
        if (s->kind == SELECTIVE_SCAN) AT_LEAST(room, s->selective_scan.size * VALUES_A_TASK);
        if (s->kind != ATTEND) continue;
        AT_LEAST(room, attend_room(&s->attend));
        if (before && alike(before, &s->attend)) continue;
        before = &s->attend;
        size.tables += pass->pieces;
        const AttendTasks made = attend_tasks(before, pass, 0);
        if (!made.by_sections) continue;
        AT_LEAST(parts, made.total * attended_floats(before, made.rows));
        AT_LEAST(counts, made.total);
    }
#undef AT_LEAST
    for (int64_t i = 0; i < program->buffers; i++)
        if (!pass->given[i]) size.floats += pass->rows * row_floats(program->widths[i]);
    size.room = row_floats(size.room), size.parts = row_floats(size.parts);
    if (size.whole) size.whole = (size.whole / LINE + 1) * LINE; /* rows are not a power of two apart */
    return size;
}

/* Says how the tasks of each step of attention are made, in tables from `at` on. */
static void plan_attention(const Run *run, int64_t *at) {
    const Attend *before = 0;
    AttendTasks made = {0};
    for (int64_t i = 0; i < run->program->count; i++) {
        const Step *s = run->program->steps + i;
        if (s->kind != ATTEND) continue;
        if (!before || !alike(before, &s->attend)) {
            made = attend_tasks(before = &s->attend, run->pass, at);
            at += run->pass->pieces;
        }
        run->progress[i].attend = made;
    }
}

/* 0, or 1 if there is no memory. */
int run_pass(const Program *program, const Pass *pass) {
    const int threads = pass->threads < 1 ? 1 : pass->threads < MOST_THREADS ? (int)pass->threads : MOST_THREADS;
    const Sizes size = sizes_of(program, pass);
    const int64_t pointers = sizeof(float *) * program->buffers, marks = sizeof(Progress) * program->count;
    const int64_t tables = sizeof(int64_t) * size.tables, counts = sizeof(atomic_int) * size.counts;
    const int64_t listed = sizeof(int32_t) * (2 * size.experts + 1 + pass->rows * size.picks);
    const int64_t most = pass->rows > pass->wanted ? pass->rows : pass->wanted, groups = size.whole / GROUP;
    /* Threads that would wait while one rounds a few rows do it themselves. */
    const int64_t apart = most > ROWS_A_TASK ? 0 : most, held = apart ? apart * threads : most;
    const int64_t rounded = held * (size.whole / TOGETHER + 3 * groups);
    const int64_t floats = sizeof(float) * (size.floats + threads * size.room + size.parts + rounded);
    float *at = (float *)memory(floats + pointers + marks + tables + counts + listed);
    if (!at) return 1;
    Lists lists = {0};
    Run run = {.program = program, .pass = pass, .room = size.room, .lists = &lists, .apart = apart};
    run.scratch = at + size.floats;
    run.parts = run.scratch + threads * size.room;
    float *entries = run.parts + size.parts, *scales = entries + held * size.whole / TOGETHER;
    run.rounded = (Rounded){(int8_t *)entries, scales, (int32_t *)(scales + held * groups), size.whole, groups};
    run.buffers = (float **)(entries + rounded);
    run.progress = (Progress *)((char *)run.buffers + pointers);
    int64_t *of_attention = (int64_t *)((char *)run.progress + marks);
    run.joined = (atomic_int *)(of_attention + size.tables);
    memset((void *)run.progress, 0, marks);
    memset((void *)run.joined, 0, counts);
    plan_attention(&run, of_attention);
    lists.experts = (int32_t *)((char *)run.joined + counts);
    lists.firsts = lists.experts + size.experts;
    lists.items = lists.firsts + size.experts + 1;
    for (int64_t i = 0; i < program->buffers; i++) {
        run.buffers[i] = pass->given[i];
        if (run.buffers[i]) continue;
        run.buffers[i] = at;
        at += pass->rows * row_floats(program->widths[i]);
    }
    together(work, &run, threads);
    return 0;
}
