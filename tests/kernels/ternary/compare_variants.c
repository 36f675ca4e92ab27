/* Every variant that this processor runs against plain C, on random sizes, between guards.
 *
 * A program of its own, because tests also build it for another architecture, whose Python they do
 * not have, and with sanitizers. It prints the variants; a difference ends it with status 1. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../../kernels/storm_kernels/ternary/csrc/ternary.h"

#define MAX_COLUMNS 1400
#define MAX_ROWS 5
#define MAX_BATCH 6
#define GUARD 64

static uint32_t state = 1;

static uint32_t draw(void)
{
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static void fail(const char *what, int variant, uint64_t columns)
{
    fprintf(stderr, "variant %d: %s differs at %llu columns\n", variant, what,
            (unsigned long long)columns);
    exit(1);
}

static void check(const char *what, int variant, uint64_t columns, const void *found,
                  const void *expected, uint64_t nbytes)
{
    if (memcmp(found, expected, nbytes) != 0)
        fail(what, variant, columns);
    for (unsigned i = 0; i < GUARD; i++)
        if (((const uint8_t *)found)[nbytes + i] != 0xa5)
            fail("the memory behind the output", variant, columns);
}

/* Exactly `nbytes` of memory at an odd address, so that a sanitizer sees the first byte beyond. */
static void *exact(const void *data, uint64_t nbytes, unsigned offset)
{
    uint8_t *memory = malloc(nbytes + offset + 1);
    memcpy(memory + offset, data, nbytes);
    return memory;
}

static void compare_planes(int variant, uint64_t rows, uint64_t columns)
{
    static int8_t values[MAX_ROWS * MAX_COLUMNS];
    static float floats[MAX_ROWS * MAX_COLUMNS];
    static uint8_t out[2][4][MAX_ROWS * MAX_COLUMNS * 4 + GUARD];
    const uint64_t pitch = (columns + 7) / 8, count = rows * columns;
    uint64_t refused;
    for (uint64_t i = 0; i < count; i++)
        floats[i] = values[i] = (int8_t)(draw() % 3) - 1;
    const int variants[2] = {STORM_TERNARY_PORTABLE, variant};
    for (unsigned side = 0; side < 2; side++) {
        memset(out[side], 0xa5, sizeof out[side]);
        storm_ternary_encode(values, STORM_TERNARY_INT8, rows, columns, -1.0f, out[side][0],
                             out[side][1], pitch, variants[side], &refused);
        storm_ternary_decode(out[side][0], out[side][1], pitch, rows, columns, out[side][2],
                             STORM_TERNARY_INT8, variants[side], &refused);
        storm_ternary_decode(out[side][0], out[side][1], pitch, rows, columns, out[side][3],
                             STORM_TERNARY_FLOAT32, variants[side], &refused);
    }
    check("bit0", variant, columns, out[1][0], out[0][0], rows * pitch);
    check("bit1", variant, columns, out[1][1], out[0][1], rows * pitch);
    check("int8", variant, columns, out[1][2], values, count);
    check("float32", variant, columns, out[1][3], floats, 4 * count);
    storm_ternary_encode(floats, STORM_TERNARY_FLOAT32, rows, columns, -1.0f, out[1][0], out[1][1],
                         pitch, variant, &refused);
    check("bit0 of float32", variant, columns, out[1][0], out[0][0], rows * pitch);

    const uint64_t packed = storm_ternary_packed_bytes(columns);
    for (unsigned side = 0; side < 2; side++) {
        memset(out[side][2], 0xa5, sizeof out[side][2]);
        storm_ternary_pack(out[0][0], out[0][1], columns, out[side][2], variants[side]);
    }
    check("packed", variant, columns, out[1][2], out[0][2], packed);
    memset(out[1], 0xa5, 2 * sizeof out[1][0]);
    if (storm_ternary_unpack(out[0][2], columns, out[1][0], out[1][1], variant))
        fail("unpacking", variant, columns);
    check("unpacked", variant, columns, out[1][0], out[0][0], pitch);
}

static void compare_product(int variant, uint64_t rows, uint64_t columns, uint64_t batch, int kind,
                            int scaled, uint64_t group)
{
    static uint8_t bit0[MAX_ROWS * MAX_COLUMNS], bit1[MAX_ROWS * MAX_COLUMNS];
    static uint8_t x0[MAX_BATCH * MAX_COLUMNS * 4], x1[MAX_BATCH * MAX_COLUMNS];
    static float scale[MAX_ROWS * MAX_COLUMNS];
    static uint8_t out[2][MAX_ROWS * MAX_BATCH * 4 + GUARD];
    const uint64_t pitch = (columns + 7) / 8, last = columns % 8 ? (1u << columns % 8) - 1 : 255;
    const uint64_t x_pitch = kind == STORM_TERNARY_PLANES    ? pitch
                             : kind == STORM_TERNARY_INT8    ? columns
                             : kind == STORM_TERNARY_FLOAT32 ? 4 * columns
                                                             : 2 * columns;
    for (uint64_t i = 0; i < rows * pitch; i++) {
        bit0[i] = draw() & (i % pitch + 1 == pitch ? last : 255);
        bit1[i] = draw() & bit0[i];
    }
    for (uint64_t i = 0; i < batch * x_pitch; i++)
        x0[i] = (uint8_t)draw();
    if (kind == STORM_TERNARY_PLANES)
        for (uint64_t i = 0; i < batch * pitch; i++) {
            x0[i] &= i % pitch + 1 == pitch ? last : 255;
            x1[i] = draw() & x0[i];
        }
    if (kind == STORM_TERNARY_FLOAT32)
        for (uint64_t i = 0; i < batch * columns; i++) {
            float value = ldexpf((float)(int)draw(), (int)(draw() % 24) - 30);
            memcpy(x0 + 4 * i, &value, 4);
        }
    if (kind == STORM_TERNARY_BFLOAT16)
        for (uint64_t i = 0; i < batch * columns; i++)
            x0[2 * i + 1] = (uint8_t)(0x3d + (draw() & 0x82)); /* neither NaN nor infinite */
    for (uint64_t i = 0; i < rows * (group ? (columns + group - 1) / group : 1); i++)
        scale[i] = (float)(int)(draw() % 2000) / 777.0f - 1.0f;
    const int floats = scaled || kind == STORM_TERNARY_FLOAT32 || kind == STORM_TERNARY_BFLOAT16;
    void *w0 = exact(bit0, rows * pitch, 1), *w1 = exact(bit1, rows * pitch, 3);
    void *given = exact(x0, batch * x_pitch, 4), *given1 = exact(x1, batch * pitch, 5);
    for (unsigned side = 0; side < 2; side++) {
        memset(out[side], 0xa5, sizeof out[side]);
        struct storm_ternary_product product = {
            (uint8_t *)w0 + 1, (uint8_t *)w1 + 3, pitch, rows, columns, batch,
            (uint8_t *)given + 4, (uint8_t *)given1 + 5, x_pitch, scaled ? scale : NULL, group,
            out[side], kind, floats ? STORM_TERNARY_FLOAT32 : STORM_TERNARY_INT32, 1,
            side ? variant : STORM_TERNARY_PORTABLE};
        if (storm_ternary_multiply(&product))
            fail("the status of a product", variant, columns);
    }
    check("a product", variant, columns, out[1], out[0], rows * batch * 4);
    int64_t sums[2] = {0, 0};
    storm_ternary_dot(bit0, bit1, bit0, bit1, pitch, STORM_TERNARY_PORTABLE, sums);
    storm_ternary_dot((uint8_t *)w0 + 1, (uint8_t *)w1 + 3, bit0, bit1, pitch, variant, sums + 1);
    if (sums[0] != sums[1])
        fail("dot", variant, columns);
    free(w0);
    free(w1);
    free(given);
    free(given1);
}

int main(int argc, char **argv)
{
    const int rounds = argc > 1 ? atoi(argv[1]) : 200;
    for (int variant = 0; variant < STORM_TERNARY_VARIANTS; variant++) {
        if (!storm_ternary_available(variant))
            continue;
        for (int round = 0; round < rounds; round++) {
            uint64_t columns = 1 + draw() % (round % 2 ? 80 : MAX_COLUMNS - 1);
            compare_planes(variant, 1 + draw() % MAX_ROWS, columns);
            for (int kind = STORM_TERNARY_INT8; kind <= STORM_TERNARY_PLANES; kind++) {
                int scaled = draw() % 2;
                uint64_t group = scaled && draw() % 2 ? 32 * (1 + draw() % 4) : 0;
                compare_product(variant, 1 + draw() % MAX_ROWS, columns, 1 + draw() % MAX_BATCH,
                                kind, scaled, group);
            }
        }
        printf("%d ", variant);
    }
    printf("\n");
    return 0;
}
