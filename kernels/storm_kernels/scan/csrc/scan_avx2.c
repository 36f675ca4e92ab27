/* Scans with AVX2: vectorised by the compiler, with non-temporal stores. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define TABLE scan_kernels_avx2

/* Writes a row. With `stream` it bypasses the caches, except for both ends up to aligned
 * vectors. */
static inline void put_row(void *dst, const void *src, size_t bytes, int stream)
{
    uint8_t *to = dst;
    const uint8_t *from = src;
    size_t head = -(uintptr_t)to & (32 - 1);
    if (!stream || bytes < head + 32) {
        memcpy(to, from, bytes);
        return;
    }
    memcpy(to, from, head);
    size_t end = head + ((bytes - head) & ~(size_t)(32 - 1));
    for (size_t i = head; i < end; i += 32)
        _mm256_stream_si256((__m256i *)(to + i), _mm256_loadu_si256((const __m256i *)(from + i)));
    memcpy(to + end, from + end, bytes - end);
}

/* Orders the streaming stores before all later stores. */
static inline void finish_rows(int stream)
{
    if (stream)
        _mm_sfence();
}

#include "scan_template.h"
