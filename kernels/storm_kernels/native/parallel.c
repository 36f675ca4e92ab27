/* See parallel.h. */
#include "parallel.h"

#include <pthread.h>

/* A tile of 64-bit elements needs about a quarter of this; the default of some systems is less. */
#define STACK_BYTES (1u << 20)

struct errand {
    void (*work)(void *item);
    void *item;
};

static void *run_errand(void *argument)
{
    struct errand *errand = argument;
    errand->work(errand->item);
    return NULL;
}

void run_parallel(void (*work)(void *item), void *items, size_t item_bytes, unsigned count)
{
    pthread_t threads[MAX_THREADS];
    struct errand errands[MAX_THREADS];
    int started[MAX_THREADS];
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    for (unsigned i = 1; i < count; i++) {
        errands[i] = (struct errand){work, (char *)items + i * item_bytes};
        started[i] = pthread_create(&threads[i], &attributes, run_errand, &errands[i]) == 0;
    }
    work(items);
    for (unsigned i = 1; i < count; i++)
        if (started[i])
            pthread_join(threads[i], NULL);
        else
            work(errands[i].item);
    pthread_attr_destroy(&attributes);
}

unsigned worthwhile_threads(int allowed, size_t units, size_t least)
{
    size_t worth = units / least;
    if (worth > MAX_THREADS)
        worth = MAX_THREADS;
    if (allowed < 1 || worth < 1)
        return 1;
    return worth < (size_t)allowed ? (unsigned)worth : (unsigned)allowed;
}
