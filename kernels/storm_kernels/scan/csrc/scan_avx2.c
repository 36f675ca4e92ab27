/* Scans with AVX2: vectorised by the compiler, with non-temporal stores. */
#define TABLE scan_kernels_avx2
#define VECTOR_BYTES 32
#define STREAM_VECTOR(to, from) \
    _mm256_stream_si256((__m256i *)(to), _mm256_loadu_si256((const __m256i *)(from)))

#include "scan_stream.h"
#include "scan_template.h"
