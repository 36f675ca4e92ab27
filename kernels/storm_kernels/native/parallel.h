/* One call's work on several threads: they are started and joined inside the call. */
#ifndef STORM_PARALLEL_H
#define STORM_PARALLEL_H

#include <stddef.h>

/* More gains nothing: the work is bound by memory long before. */
#define MAX_THREADS 64

/* Calls work(item) once for each of count <= MAX_THREADS items of item_bytes each, the first on
 * the calling thread, and returns when all are done. A thread that cannot be started only costs
 * time: its item is done here. */
void run_parallel(void (*work)(void *item), void *items, size_t item_bytes, unsigned count);

/* How many threads `units` of work are worth when one should have at least `least` of them. */
unsigned worthwhile_threads(int allowed, size_t units, size_t least);

#endif
