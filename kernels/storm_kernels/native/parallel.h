/* Runs the work of one call on several threads, which start and are joined inside the call. */
#ifndef STORM_PARALLEL_H
#define STORM_PARALLEL_H

#include <stddef.h>

/* More threads gain nothing: fewer already saturate the memory bandwidth. */
#define MAX_THREADS 64

/* Calls work(item) once for each of count <= MAX_THREADS items of item_bytes each, the first on
 * the calling thread, and returns when all are done. If a thread cannot be started, the calling
 * thread does its item, which only costs time. */
void run_parallel(void (*work)(void *item), void *items, size_t item_bytes, unsigned count);

/* How many threads, of `allowed`, to use for `units` of work with at least `least` units each. */
unsigned worthwhile_threads(int allowed, size_t units, size_t least);

#endif
