/* Scans with AVX-512: vectorised by the compiler, with non-temporal stores. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define TABLE scan_kernels_avx512

/* Writes a row. With `stream` it bypasses the caches, except for both ends up to aligned
 * vectors. */
static inline void put_row(void *dst, const void *src, size_t bytes, int stream)
{
    uint8_t *to = dst;
    const uint8_t *from = src;
    size_t head = -(uintptr_t)to & (64 - 1);
    if (!stream || bytes < head + 64) {
        memcpy(to, from, bytes);
        return;
    }
    memcpy(to, from, head);
    size_t end = head + ((bytes - head) & ~(size_t)(64 - 1));
    for (size_t i = head; i < end; i += 64)
        _mm512_stream_si512((__m512i *)(to + i), _mm512_loadu_si512((const __m512i *)(from + i)));
    memcpy(to + end, from + end, bytes - end);
}

/* Orders the streaming stores before all later stores. */
static inline void finish_rows(int stream)
{
    if (stream)
        _mm_sfence();
}

#include "scan_template.h"
