/* Elements of type WORD one by one: scatter.c includes this for each type, and NAMED gives the functions their names.
 * MAGNITUDE are the bits that a zero has not. */

TN_INLINE bool NAMED(any_zero)(const WORD *values, int64_t count) {
    WORD found = 0;
    for (int64_t i = 0; i < count; i++) found |= (WORD)((values[i] & (WORD)MAGNITUDE) == 0);
    return found != 0;
}

/* Elements until the last value has its place; with `align`, at most to the next whole byte of the mask. */
static void NAMED(scatter)(const tn_scatter_args *args, cursor_t *at, bool align) {
    const WORD *values = args->values;
    WORD *out = args->out;
    const WORD keep = (WORD)args->keep;
    const int64_t end = align && at->element + 7 < args->count ? (at->element + 7) & ~(int64_t)7 : args->count;
    for (; at->element < end; at->element++) {
        const WORD word = out[at->element];
        const bool wants = args->mask != NULL ? bit_of(args->mask, at->element) : (word & (WORD)MAGNITUDE) != 0;
        if (wants) {
            if (at->value == args->num_values) return;
            const WORD value = (WORD)((args->mask != NULL ? 0 : word & keep) | values[at->value++]);
            at->has_zero |= (value & (WORD)MAGNITUDE) == 0;
            out[at->element] = value;
        } else {
            if (args->mask != NULL) {
                const bool sign = args->signs != NULL && at->sign < args->num_signs && bit_of(args->signs, at->sign);
                out[at->element] = sign ? (WORD)~(WORD)MAGNITUDE : 0;
            }
            at->sign++;
        }
        if (at->value == args->num_values && args->num_values != 0) {
            at->element++;
            return;
        }
    }
}
