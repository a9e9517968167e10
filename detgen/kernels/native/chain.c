/* Several passes in one call: after each, every sequence goes on with its largest logit, or the one that its sampling is
 * likely to choose. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "program.h"

int run_pass(const Program *program, const Pass *pass);
int chain_bytes(void) { return sizeof(Chain); }

/* Whether a sequence ends with a token. */
static int is_end(const Chain *chain, int64_t sequence, int64_t token) {
    for (int64_t e = 0; e < chain->ending; e++)
        if (chain->ends[e] == token) return chain->to_end[sequence];
    return 0;
}

/* What a sequence goes on with after a pass; -1 where its result is not finite. */
static int64_t chosen(const Chain *chain, int64_t place, int64_t width) {
    if (chain->draws) return chain->tokens[place];
    const float *score = chain->scores + place * width;
    int32_t token;
    memcpy(&token, score + 3, sizeof token);
    return score[0] - score[0] == 0 && score[2] - score[2] == 0 ? token : -1;
}

/* Keeps the result of a sequence in a pass. */
static void keep_result(const Chain *chain, int64_t step, int64_t sequences, int64_t i, const float *row, int64_t width) {
    if (chain->draws) chain->tokens[step * sequences + i] = likely(chain->draws, i, row, step);
    else memcpy(chain->scores + (step * sequences + i) * width, row, sizeof(float) * width);
}

/* Of the first pass one row a sequence is wanted, in their order. 0, or 1 if there is no memory. */
int run_chain(const Program *program, const Pass *first, const Chain *chain) {
    const int64_t n = first->wanted, out = program->steps[program->count - 1].to, width = program->widths[out];
    int64_t *numbers = malloc(sizeof(int64_t) * n * 5), *at = numbers + 4 * n;
    Piece *pieces = malloc(sizeof(Piece) * n);
    float **given = malloc(sizeof(float *) * program->buffers);
    float *results = malloc(sizeof(float) * n * width);
    uint8_t *broken = malloc(n);
    int failed = !numbers || !pieces || !given || !results || !broken;
    Pass pass = *first;
    pass.given = given;
    if (!failed) {
        memcpy(given, first->given, sizeof(float *) * program->buffers), given[out] = results;
        failed = run_pass(program, &pass);
        for (int64_t i = 0; i < n && !failed; i++) keep_result(chain, 0, n, i, results + i * width, width);
    }
    pass.ids = numbers, pass.positions = numbers + n, pass.places = numbers + 2 * n, pass.want = numbers + 3 * n;
    pass.piece = pieces, pass.broken = broken;
    for (int64_t step = 1; step < chain->steps && !failed; step++) {
        int64_t rows = 0;
        for (int64_t i = 0; i < n; i++) {
            const int64_t row = first->want[i], position = first->positions[row] + step;
            const int64_t token = chosen(chain, (step - 1) * n + i, width);
            const int bad = step == 1 ? first->broken[row] : chain->broken[(step - 1) * n + i];
            if (chain->lengths[i] <= step || bad || token < 0 || is_end(chain, i, token)) {
                chain->lengths[i] = chain->lengths[i] < step ? chain->lengths[i] : step;
                continue;
            }
            const int64_t page = first->tables[chain->slots[i] * first->blocks + position / PAGE];
            numbers[rows] = token, numbers[n + rows] = position;
            numbers[2 * n + rows] = page * PAGE + position % PAGE, numbers[3 * n + rows] = rows;
            pieces[rows] = (Piece){chain->slots[i], position, 1, rows};
            at[rows++] = i;
        }
        if (!rows) break;
        pass.rows = pass.wanted = pass.pieces = rows;
        memset(broken, 0, n);
        failed = run_pass(program, &pass);
        for (int64_t r = 0; r < rows && !failed; r++) {
            keep_result(chain, step, n, at[r], results + r * width, width);
            chain->broken[step * n + at[r]] = broken[r];
        }
    }
    free(numbers), free(pieces), free(given), free(results), free(broken);
    return failed;
}
