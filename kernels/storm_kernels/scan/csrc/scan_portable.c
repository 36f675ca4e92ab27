/* Scans in plain C: they run everywhere, and tests compare the other variants with them. */
#include <string.h>

#define TABLE scan_kernels_portable
#define put_row(dst, src, bytes, stream) ((void)(stream), memcpy(dst, src, bytes))
#define finish_rows(stream) ((void)(stream))

#include "scan_template.h"
