/* Several passes in one call: after each, every sequence goes on with its largest logit. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "program.h"

int run_pass(const Program *program, const Pass *pass);
int chain_bytes(void) { return sizeof(Chain); }

/* Of the first pass one row a sequence is wanted, in their order. 0, or 1 if there is no memory. */
int run_chain(const Program *program, const Pass *first, const Chain *chain) {
    const int64_t n = first->wanted, out = program->steps[program->count - 1].to, width = program->widths[out];
    int64_t *numbers = malloc(sizeof(int64_t) * n * 5), *at = numbers + 4 * n;
    Piece *pieces = malloc(sizeof(Piece) * n);
    const float **given = malloc(sizeof(float *) * program->buffers);
    float *scores = malloc(sizeof(float) * n * width);
    uint8_t *broken = malloc(n);
    int failed = !numbers || !pieces || !given || !scores || !broken || run_pass(program, first);
    Pass pass = *first;
    pass.ids = numbers, pass.positions = numbers + n, pass.places = numbers + 2 * n, pass.want = numbers + 3 * n;
    pass.piece = pieces, pass.given = (float *const *)given, pass.broken = broken;
    if (!failed) memcpy(given, first->given, sizeof(float *) * program->buffers), given[out] = scores;
    for (int64_t step = 1; step < chain->steps && !failed; step++) {
        const float *before = chain->scores + (step - 1) * n * width;
        int64_t rows = 0;
        for (int64_t i = 0; i < n; i++) {
            const float *score = before + i * width;
            int32_t token;
            memcpy(&token, score + 3, sizeof token);
            const int64_t row = first->want[i], position = first->positions[row] + step;
            const int bad = step == 1 ? first->broken[row] : chain->broken[(step - 1) * n + i];
            if (chain->lengths[i] <= step || bad || !(score[0] - score[0] == 0) || !(score[2] - score[2] == 0)) {
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
        for (int64_t r = 0; r < rows; r++) {
            memcpy(chain->scores + (step * n + at[r]) * width, scores + r * width, sizeof(float) * width);
            chain->broken[step * n + at[r]] = broken[r];
        }
    }
    free(numbers), free(pieces), free(given), free(scores), free(broken);
    return failed;
}
