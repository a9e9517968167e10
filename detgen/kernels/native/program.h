/* What a pass does, as a list of steps on buffers of rows; native/program.py has the same structures. */

#ifndef DETGEN_PROGRAM
#define DETGEN_PROGRAM

#include "draws.h"

#define PAGE 64 /* positions of a page of the KV cache */

enum { EMBED, NORM, LINEAR, ROTATE, ATTEND, COPY, ROUTE, SORT, COMBINE, SCORE, ACTIVATE, SOFTMAX, SUM };
enum { RMS, LAYER };                                /* norms */
enum { NO_ACTIVATION, SILU, GELU_TANH, GELU, RELU }; /* activations */
enum { SIGMOID = RELU + 1, TANH, ROOT, RECIPROCAL_ROOT }; /* other functions of ACTIVATE */

/* A step. What a kind has no use for is 0. Places are in floats from the beginning of a row. */
typedef struct {
    int64_t kind;
    int64_t from, from_at; /* buffer that is read, and the place in its rows */
    int64_t to, to_at;
    int64_t wanted;        /* the rows are those of which logits are wanted, instead of all rows of the pass */
    int64_t add;           /* adds to what is there */
    double factor;         /* of what is stored or added */
    double softcap;        /* x becomes softcap * tanh(x / softcap); 0 for none */
    /* EMBED, NORM, LINEAR */
    const void *weight;
    const float *scales; /* LINEAR: of weights in few bits */
    const float *bias;
    int64_t columns, inputs; /* EMBED: entries of a row, rows of the table; NORM: entries, vectors in a row;
                              * ACTIVATE, SOFTMAX, SUM: entries of a row */
    int64_t storage;
    int64_t variant; /* NORM: its kind; LINEAR: the activation; ACTIVATE: the function; EMBED: whether by position;
                      * COPY: 1 takes wanted rows, 2 multiplies rows by factors; ROUTE: whether weights are made to add
                      * up to 1 */
    int64_t gated;           /* LINEAR: half of a panel's columns are gates of the others */
    int64_t scored;          /* LINEAR: the results are logits, of which only what SCORE reads is stored; see score.h */
    int64_t weight_step;     /* NORM: entries from a vector's weights to the next one's */
    int64_t offset;          /* EMBED: is added to positions */
    /* Mixtures of experts. A row's routes are `picks` pairs of an expert's number and its weight, in order of the
     * numbers; what experts read and write has a segment for each of them. */
    int64_t experts, picks;
    int64_t routes;             /* buffer of routes; COPY of variant 2: of factors, whose sigmoid is taken */
    int64_t from_step, to_step; /* LINEAR: floats from a segment to the next; 0 for one segment */
    double epsilon;          /* NORM */
    /* ROTATE, ATTEND: q, k and v follow each other in a row of `from` */
    int64_t heads, kv_heads, size, values;
    int64_t turned;      /* entries of a head that are rotated */
    int64_t interleaved; /* entries 2 i and 2 i + 1 are rotated together, else i and turned / 2 + i */
    int64_t window;      /* positions that a row sees, its own included; 0 for all */
    int64_t chunk;       /* positions of a chunk, before whose first a row sees nothing; 0 for no chunks */
    int64_t last;        /* notes the rows whose keys are not finite */
    double scale;
    const float *cosines, *sines; /* [positions, turned / 2] */
    float *keys;   /* [pages, kv_heads, size, PAGE] */
    float *kept;   /* values: [pages * PAGE, kv_heads, values] */
} Step;

typedef struct {
    const Step *steps;
    int64_t count, buffers;
    const int64_t *widths; /* floats of a row of each buffer */
} Program;

/* Consecutive tokens of a slot, from position `start` and row `row` of the pass on. */
typedef struct {
    int64_t slot, start, tokens, row;
} Piece;

typedef struct {
    int64_t threads, rows, wanted, pieces, blocks;
    const int64_t *ids, *positions, *places; /* [rows]; a place is where the row's entries are stored */
    const int64_t *want;                     /* [wanted] rows */
    const Piece *piece;                      /* the longest first */
    const int64_t *tables;                   /* [slots, blocks] pages */
    float *const *given;                     /* [buffers]; null for those that the pass brings itself */
    uint8_t *broken;                         /* [rows] */
    double most;                             /* bound of the cache's entries */
} Pass;

/* Passes one after the other. By sequence, of which there are as many as the first pass has wanted rows: its slot, and
 * the number of passes that it takes part in, at least 1, lowered where a result is not finite, and where a token is
 * one of `ends`, of which there are `ending`, if the sequence is to end there; by sequence and pass, what SCORE makes of
 * it, and whether a key of the last layer is not finite, which of the first pass stands there.
 *
 * Where sequences are sampled, and `draws` tells how, the results are logits instead, kept unless `results` is null, and
 * `tokens` takes, by sequence and pass, what is likely to be chosen, -1 where nobody can tell. */
typedef struct {
    int64_t steps, ending;
    const int64_t *ends;
    const uint8_t *to_end;
    const int64_t *slots;
    int64_t *lengths;
    float *results;
    uint8_t *broken;
    const Draws *draws;
    int64_t *tokens;
} Chain;

#endif
