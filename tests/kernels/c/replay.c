/* Runs a pass that another process wrote to a file, and writes what its memory holds afterwards: replay IN OUT.
 *
 * The file has int64 numbers: how many regions of memory there are, how many pointers, the addresses of the program and
 * of the pass; then each region's address, size and bytes; then where each pointer lies. Addresses are those of the
 * process that wrote it. */

#include <stdio.h>
#include <stdlib.h>

#include "layout.h"

int run_pass(const Program *program, const Pass *pass);

typedef struct {
    int64_t address, size;
    char *here;
} Region;

static Region *regions;
static int64_t count;

static void *moved(const void *address) {
    for (int64_t i = 0; i < count; i++) {
        int64_t at = (int64_t)address - regions[i].address;
        if (at >= 0 && at < regions[i].size) return regions[i].here + at;
    }
    if (address) exit(3);
    return 0;
}

static void take(void *to, size_t size, FILE *file) {
    if (fread(to, 1, size, file) != size) exit(2);
}

int main(int argc, char **argv) {
    int64_t head[4], place;
    FILE *in = argc == 3 ? fopen(argv[1], "rb") : 0, *out = argc == 3 ? fopen(argv[2], "wb") : 0;
    if (!in || !out) return 1;
    take(head, sizeof head, in);
    count = head[0];
    regions = calloc(count, sizeof *regions);
    for (int64_t i = 0; i < count; i++) {
        take(regions + i, 2 * sizeof(int64_t), in);
        regions[i].here = malloc(regions[i].size + 1);
        take(regions[i].here, regions[i].size, in);
    }
    for (int64_t i = 0; i < head[1]; i++) {
        take(&place, sizeof place, in);
        void **pointer = moved((void *)place);
        *pointer = moved(*pointer);
    }
    const Program *program = moved((void *)head[2]);
    const Pass *pass = moved((void *)head[3]);
    if (run_pass(program, pass)) return 4;
    for (int64_t i = 0; i < count; i++)
        if (fwrite(regions[i].here, 1, regions[i].size, out) != (size_t)regions[i].size) return 5;
    return fclose(out) ? 6 : 0;
}
