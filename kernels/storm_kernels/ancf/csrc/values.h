/* Finds the dictionary entry of an element, for encoding in modes ternary and values.
 *
 * It is a small open-addressed hash table, built once per tensor and then only read. */
#ifndef STORM_VALUES_H
#define STORM_VALUES_H

#include <stdint.h>
#include <string.h>

#define VALUE_INDEX_BITS 11
#define VALUE_INDEX_SLOTS (1 << VALUE_INDEX_BITS) /* four times the largest dictionary */

struct value_index {
    uint64_t keys[VALUE_INDEX_SLOTS];
    uint16_t entries[VALUE_INDEX_SLOTS]; /* `missing` marks an empty slot, which ends a search */
    uint16_t missing;
};

/* Fibonacci hashing: the golden ratio's bits spread neighbouring values over the table. */
static inline unsigned value_slot(uint64_t value)
{
    return (unsigned)((value * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - VALUE_INDEX_BITS));
}

/* `missing` is the result of find_value for other values; count is far below the number of
 * slots. */
static inline void index_values(const uint64_t *values, unsigned count, uint16_t missing,
                                struct value_index *index)
{
    index->missing = missing;
    for (unsigned slot = 0; slot < VALUE_INDEX_SLOTS; slot++)
        index->entries[slot] = missing;
    for (unsigned i = 0; i < count; i++) {
        unsigned slot = value_slot(values[i]);
        while (index->entries[slot] != missing)
            slot = (slot + 1) % VALUE_INDEX_SLOTS;
        index->keys[slot] = values[i];
        index->entries[slot] = (uint16_t)i;
    }
}

static inline uint16_t find_value(const struct value_index *index, uint64_t value)
{
    unsigned slot = value_slot(value);
    while (index->entries[slot] != index->missing && index->keys[slot] != value)
        slot = (slot + 1) % VALUE_INDEX_SLOTS;
    return index->entries[slot];
}

#endif
