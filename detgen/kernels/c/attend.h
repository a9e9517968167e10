/* Attention over the pages of a KV cache: what a pass needs to know of it. */

#ifndef DETGEN_ATTEND
#define DETGEN_ATTEND

#include "layout.h"
#include "pool.h"

/* How the tasks of a step are made. */
typedef struct {
    int64_t total, rows; /* rows: the most of a batch */
    int64_t *firsts;     /* [pieces] the first task of each piece */
    int by_sections;     /* whether sections are tasks of their own, because there are few others */
} AttendTasks;

/* Where rows are read and written, and what is known of them meanwhile: of each task if sections are tasks, with the number
 * of those of the same queries that are over, at the first of them. */
typedef struct {
    const float *x;
    float *to, *scratch, *parts;
    atomic_int *joined;
    int64_t x_row, to_row;
} AttendMemory;

/* Floats that a thread needs: queries, weights, what is known after a section and after all of them. */
int64_t attend_room(const Attend *s);

/* Floats of what is known of some rows after some of their keys. */
int64_t attended_floats(const Attend *s, int64_t rows);

/* Whether the tasks of two steps are made alike. */
int alike(const Attend *a, const Attend *b);

/* How the tasks of a step are made; `firsts` takes the first ones, null for none. */
AttendTasks attend_tasks(const Attend *s, const Pass *pass, int64_t *firsts);

/* One head's keys and values, all sections or one of them, for some queries of a piece. The task that is the last of its
 * queries puts sections together. */
void attend_task(const Attend *s, const Pass *pass, AttendTasks tasks, int64_t whole, AttendMemory at);

#endif
