/* Scans with AVX-512: vectorised by the compiler, with non-temporal stores. */
#define TABLE scan_kernels_avx512
#define VECTOR_BYTES 64
#define STREAM_VECTOR(to, from) \
    _mm512_stream_si512((__m512i *)(to), _mm512_loadu_si512((const __m512i *)(from)))

#include "scan_stream.h"
#include "scan_template.h"
