/* Encodes many tensors in every way, damages the blobs, and decodes them.
 *
 * Built with AddressSanitizer and UBSan by test_sanitizers.py: every buffer is an allocation of
 * exactly the size that the library was told, so any access outside stops the program. A blob
 * that is whole must give the original bytes; a damaged one STORM_CORRUPT or, with a checksum and
 * an untouched header, the original bytes. Every instruction set must write plain C's blobs.
 * Usage: fuzz_codec ROUNDS. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ancf.h"
#include "blob.h"

static uint64_t state = 1;

static uint64_t draw(void) /* splitmix64 */
{
    uint64_t z = state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static uint64_t below(uint64_t limit) { return draw() % limit; }

static void fail(const char *what, const struct storm_ancf_options *options, int dtype,
                 uint64_t nbytes)
{
    fprintf(stderr, "%s: mode %d, dense %d, isa %d, threads %d, dtype %d, %llu bytes\n", what,
            options->mode, options->dense, options->isa, options->threads, dtype,
            (unsigned long long)nbytes);
    exit(1);
}

/* Elements of about `spread` exponents, some zeros, sometimes few values, now and then noise;
 * sometimes all zeros up to some place, so that whole ranges of tiles need no records. */
static uint8_t *make_tensor(uint64_t n, unsigned bits, unsigned mantissa)
{
    unsigned bytes = bits / 8, zeros = (unsigned)below(100), kind = (unsigned)below(6);
    uint64_t spread = 1 + below(24), low = kind == 1 ? 0xFFFF : kind == 2 ? 0x1FFF : 0;
    uint64_t mask = bits == 64 ? ~UINT64_C(0) : (UINT64_C(1) << bits) - 1;
    uint64_t signs = below(2) ? 0 : UINT64_C(1) << (bits - 1); /* whether zeros keep theirs */
    uint64_t silent = below(4) ? 0 : below(n + 1);
    uint8_t *data = malloc(n * bytes + 1);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t element = (draw() & ((UINT64_C(1) << mantissa) - 1)) |
                           (below(spread) + 3) << mantissa | below(2) << (bits - 1);
        element &= ~low & mask;
        if (kind == 3)
            element = below(4); /* few values, booleans now and then */
        if (kind == 4)
            element = below(2);
        if (kind == 5 || below(300) == 0)
            element = draw() & mask;
        if (below(100) < zeros || i < silent)
            element &= signs;
        memcpy(data + i * bytes, &element, bytes);
    }
    return data;
}

static void check_decoding(const uint8_t *blob, uint64_t size, const uint8_t *data,
                           uint64_t nbytes, const struct storm_ancf_options *options, int dtype,
                           int must_match)
{
    uint8_t *exact = malloc(size + 1), *out = malloc(nbytes + 1);
    /* The end of each buffer is the end of its allocation; one spare byte lies in front. */
    memcpy(exact + 1, blob, size);
    int status = storm_ancf_decode(exact + 1, size, out + 1, nbytes, options);
    if (status != STORM_OK && status != STORM_CORRUPT)
        fail("an unknown status", options, dtype, nbytes);
    if (status == STORM_OK && must_match && memcmp(out + 1, data, nbytes) != 0)
        fail("another tensor came back", options, dtype, nbytes);
    if (status != STORM_OK && must_match == 2)
        fail("a whole blob was refused", options, dtype, nbytes);
    free(exact);
    free(out);
}

/* One field of the header changed and signed again, so that later checks have to notice. */
static void damage_header(uint8_t *blob)
{
    struct ancf_header header;
    memcpy(&header, blob, sizeof header);
    uint8_t *fields = (uint8_t *)&header;
    fields[6 + below(138)] ^= (uint8_t)(1u << below(8));
    if (below(2))
        header.flags = 0, header.checksum = 0;
    store_header(&header, blob);
}

static void damage_and_decode(const uint8_t *blob, uint64_t size, const uint8_t *data,
                              uint64_t nbytes, const struct storm_ancf_options *options, int dtype)
{
    uint8_t *copy = malloc(size);
    memcpy(copy, blob, size);
    uint64_t kept = size;
    int header_damaged = 0;
    switch (below(4)) {
    case 0:
        kept = below(size);
        header_damaged = 1;
        break;
    case 1:
        damage_header(copy);
        header_damaged = 1;
        break;
    case 2: /* early in the body: dictionary, directory */
        copy[size > 256 ? 256 + below(size - 256 < 64 ? size - 256 : 64) : 0] = (uint8_t)draw();
        break;
    default:
        for (uint64_t times = 1 + below(8); times > 0 && size > 256; times--)
            copy[256 + below(size - 256)] = (uint8_t)draw();
    }
    int sealed = options->checksum && !header_damaged;
    check_decoding(copy, kept, data, nbytes, options, dtype, sealed);
    free(copy);
}

/* The instruction set and the number of threads must not show in the bytes. */
static void check_same_blob(const uint8_t *blob, uint64_t size, const uint8_t *data,
                            uint64_t nbytes, struct storm_ancf_options options, int dtype)
{
    uint8_t *plain = malloc(nbytes + 256);
    options.isa = STORM_ISA_PORTABLE;
    options.threads = 1;
    int64_t expected = storm_ancf_encode(data, nbytes, dtype, plain, nbytes + 256, &options);
    if (expected != (int64_t)size || memcmp(plain, blob, size) != 0)
        fail("another blob than plain C's", &options, dtype, nbytes);
    free(plain);
}

static void run_round(void)
{
    int dtype = (int)below(ANCF_DTYPES);
    const struct ancf_dtype_info *info = dtype_info(dtype);
    uint64_t n = below(3) ? below(9000) : below(64);
    if (below(40) == 0)
        n = 4096 * (130 + below(40)) + below(4096); /* enough tiles for two threads */
    uint64_t nbytes = n * (info->bits / 8), limit = nbytes + 256;
    uint8_t *data = make_tensor(n, info->bits, info->mantissa), *blob = malloc(limit);
    struct storm_ancf_options options = {
        .mode = (int)below(ANCF_MODES + 1) - 1, .dense = (int)below(2), .checksum = (int)below(2),
        .policy = (int)below(3), .threads = 1 + (int)below(3), .isa = (int)below(STORM_ISA_COUNT)};
    if (!storm_isa_available(options.isa))
        options.isa = STORM_ISA_BEST;
    int64_t size = storm_ancf_encode(data, nbytes, dtype, blob, limit, &options);
    if (size < 256 || (uint64_t)size > limit)
        fail("encoding failed", &options, dtype, nbytes);
    check_same_blob(blob, (uint64_t)size, data, nbytes, options, dtype);
    check_decoding(blob, (uint64_t)size, data, nbytes, &options, dtype, 2);
    for (unsigned i = 0; i < 12; i++)
        damage_and_decode(blob, (uint64_t)size, data, nbytes, &options, dtype);
    free(data);
    free(blob);
}

int main(int argc, char **argv)
{
    long rounds = argc > 1 ? strtol(argv[1], NULL, 10) : 1000;
    for (long i = 0; i < rounds; i++) {
        state = (uint64_t)i * 77777 + 1;
        run_round();
    }
    printf("%ld rounds\n", rounds);
    return 0;
}
