/* Several passes in one call: after each, every sequence goes on with its largest logit, or the one that its sampling is
 * likely to choose. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"
#include "layout.h"

#define MANY (1 << 18) /* entries of results that threads share */

int run_pass(const Program *program, const Pass *pass);
int64_t likely(const Draws *draws, int64_t i, const float *x, int64_t further);

/* Whether a sequence ends with a token. */
static int is_end(const Chain *chain, int64_t sequence, int64_t token) {
    for (int64_t e = 0; e < chain->ending; e++)
        if (chain->ends[e] == token) return chain->to_end[sequence];
    return 0;
}

/* What a sequence goes on with after a pass; -1 where its result is not finite. */
static int64_t chosen(const Chain *chain, int64_t place, int64_t width) {
    if (chain->draws) return chain->tokens[place];
    const float *score = chain->results + place * width;
    int32_t token;
    memcpy(&token, score + 3, sizeof token);
    return score[0] - score[0] == 0 && score[2] - score[2] == 0 ? token : -1;
}

/* The results of a pass, [count, width], and the sequences that they belong to. */
typedef struct {
    const Chain *chain;
    const float *rows;
    const int64_t *at;
    int64_t step, count, width;
    atomic_int next;
} Results;

/* Keeps the results of one sequence after the other. */
static void keep_rows(void *of, int thread) {
    Results *results = of;
    const Chain *chain = results->chain;
    (void)thread;
    for (int64_t r; (r = atomic_fetch_add(&results->next, 1)) < results->count;) {
        const int64_t i = results->at[r], place = i * chain->steps + results->step, width = results->width;
        const float *row = results->rows + r * width;
        if (chain->draws) chain->tokens[place] = likely(chain->draws, i, row, results->step);
        if (chain->results) memcpy(chain->results + place * width, row, sizeof(float) * width);
    }
}

static void keep_results(const Chain *chain, int64_t step, int64_t count, const int64_t *at, const float *rows, int64_t width,
                         int64_t threads) {
    Results results = {chain, rows, at, step, count, width, 0};
    together(keep_rows, &results, count > 1 && count * width > MANY ? (int)threads : 1);
}

/* Of the first pass one row a sequence is wanted, in their order. 0, or 1 if there is no memory. */
int run_chain(const Program *program, const Pass *first, const Chain *chain) {
    const int64_t n = first->wanted, out = program->out, width = program->widths[out];
    int64_t *numbers = malloc(sizeof(int64_t) * n * 5), *at = numbers + 4 * n;
    Piece *pieces = malloc(sizeof(Piece) * n);
    Span *spans = malloc(sizeof(Span) * n);
    float **given = malloc(sizeof(float *) * program->buffers);
    float *results = malloc(sizeof(float) * n * width);
    uint8_t *broken = malloc(n);
    int failed = !numbers || !pieces || !spans || !given || !results || !broken;
    Pass pass = *first;
    pass.given = given;
    if (!failed) {
        memcpy(given, first->given, sizeof(float *) * program->buffers), given[out] = results;
        for (int64_t i = 0; i < n; i++) at[i] = i;
        failed = run_pass(program, &pass);
        if (!failed) keep_results(chain, 0, n, at, results, width, pass.threads);
    }
    pass.ids = numbers, pass.positions = numbers + n, pass.places = numbers + 2 * n, pass.want = numbers + 3 * n;
    pass.piece = pieces, pass.span = spans, pass.broken = broken;
    for (int64_t step = 1; step < chain->steps && !failed; step++) {
        int64_t rows = 0;
        for (int64_t i = 0; i < n; i++) {
            const int64_t row = first->want[i], position = first->positions[row] + step;
            const int64_t before = i * chain->steps + step - 1, token = chosen(chain, before, width);
            const int bad = step == 1 ? first->broken[row] : chain->broken[before];
            if (chain->lengths[i] <= step || bad || token < 0 || is_end(chain, i, token)) {
                chain->lengths[i] = chain->lengths[i] < step ? chain->lengths[i] : step;
                continue;
            }
            const int64_t page = first->tables[chain->slots[i] * first->blocks + position / PAGE];
            numbers[rows] = token, numbers[n + rows] = position;
            numbers[2 * n + rows] = page * PAGE + position % PAGE, numbers[3 * n + rows] = rows;
            pieces[rows] = (Piece){chain->slots[i], position, 1, rows};
            spans[rows] = (Span){chain->slots[i], rows, position, 1, position, position + 1}; /* its row stands */
            at[rows++] = i;
        }
        if (!rows) break;
        pass.rows = pass.wanted = pass.pieces = rows, pass.spans = first->spans ? rows : 0;
        memset(broken, 0, n);
        failed = run_pass(program, &pass);
        if (failed) break;
        keep_results(chain, step, rows, at, results, width, pass.threads);
        for (int64_t r = 0; r < rows; r++) chain->broken[at[r] * chain->steps + step] = broken[r];
    }
    free(numbers), free(pieces), free(spans), free(given), free(results), free(broken);
    return failed;
}
