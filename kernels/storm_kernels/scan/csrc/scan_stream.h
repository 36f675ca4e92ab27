/* Rows that are written past the caches, by vectors of VECTOR_BYTES bytes.
 *
 * The including file defines VECTOR_BYTES and STREAM_VECTOR(to, from), which copies one of them to
 * an aligned address. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

/* Writes a row. With `stream` it bypasses the caches, except for both ends up to aligned
 * vectors. */
static inline void put_row(void *dst, const void *src, size_t bytes, int stream)
{
    uint8_t *to = dst;
    const uint8_t *from = src;
    size_t head = -(uintptr_t)to & (VECTOR_BYTES - 1);
    if (!stream || bytes < head + VECTOR_BYTES) {
        memcpy(to, from, bytes);
        return;
    }
    memcpy(to, from, head);
    size_t end = head + ((bytes - head) & ~(size_t)(VECTOR_BYTES - 1));
    for (size_t i = head; i < end; i += VECTOR_BYTES)
        STREAM_VECTOR(to + i, from + i);
    memcpy(to + end, from + end, bytes - end);
}

/* Orders the streaming stores before all later stores. */
static inline void finish_rows(int stream)
{
    if (stream)
        _mm_sfence();
}
