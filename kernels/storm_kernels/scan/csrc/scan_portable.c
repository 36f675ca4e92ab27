/* Scans in plain C: run everywhere, and what the others are compared with. */
#include <string.h>

#define TABLE scan_kernels_portable
#define put_row(dst, src, bytes, stream) ((void)(stream), memcpy(dst, src, bytes))
#define finish_rows(stream) ((void)(stream))

#include "scan_template.h"
