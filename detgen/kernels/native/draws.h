/* Rows that are sampled, as choosing.c takes them. */

#ifndef DETGEN_DRAWS
#define DETGEN_DRAWS

#include "logits.h"

#define MOST 64 /* room for candidates of a row */

/* By place in `rows`. `found` is the number of candidates, in order of their ids; 0 where the largest logit is not
 * finite; -1 where the caller has to do without. */
typedef struct {
    Rows of;
    const double *temperatures, *top_p, *floors; /* a floor is the logarithm of min_p, -inf for none */
    const int64_t *top_k;
    const uint64_t *seeds, *samples, *positions;
    int64_t *ids;    /* [count, MOST] */
    uint64_t *words; /* [count, MOST] */
    int64_t *found;
    float *peaks; /* the largest logits */
} Draws;

/* The entry that row `i`, whose logits are `x`, is likely to choose `further` positions on: the one with the best score
 * as the C library's logarithms have it, so rounding may make it another. -1 where it cannot be told. */
int64_t likely(const Draws *draws, int64_t i, const float *x, int64_t further);

#endif
