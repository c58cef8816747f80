/* One plane of a frame of words of type WORD: split.c includes this for each type, and NAMED gives the functions their
 * names. */

/* How a word becomes a plane's bits. */
typedef struct {
    int sign_down;     /* of the word, so that its sign stands where the field has it; -1: the field has none */
    int mantissa_down; /* of the word, so that the field's mantissa bits are the lowest */
    WORD mantissa;     /* these bits */
    WORD sign;         /* the field's */
    int down;          /* of the field, so that the plane's bits are the lowest */
    WORD mask;         /* these */
} NAMED(cut_t);

TN_INLINE uint8_t NAMED(cut)(WORD word, NAMED(cut_t) by) {
    const WORD field = (WORD)((WORD)(word >> by.mantissa_down) & by.mantissa) | (WORD)((WORD)(word >> by.sign_down) & by.sign);
    return (uint8_t)((WORD)(field >> by.down) & by.mask);
}

static void NAMED(split_plane)(const WORD *restrict words, int64_t count, const tn_split_args *args, int plane, int below,
                               uint8_t *restrict to) {
    const int width = 8 * (int)sizeof(WORD), bits = args->plane_bits[plane];
    if (plane == 0 && args->has_exponents) {
        const int down = args->mantissa_bits;
        const WORD mask = (WORD)(((WORD)1 << (width - 1 - args->mantissa_bits)) - 1);
        for (int64_t i = 0; i < count; i++) to[i] = (uint8_t)((WORD)(words[i] >> down) & mask);
        return;
    }
    const int mantissa = args->field_bits - args->has_exponents, unknown = args->mantissa_bits - args->known_bits;
    const NAMED(cut_t) by = {
        .sign_down = args->has_exponents ? width - 1 - mantissa : 0,
        .mantissa_down = unknown,
        .mantissa = (WORD)(((WORD)1 << mantissa) - 1),
        .sign = args->has_exponents ? (WORD)((WORD)1 << mantissa) : 0,
        .down = below,
        .mask = (WORD)((1 << bits) - 1),
    };
    const int share = 8 / bits;
    const int64_t row = (count + share - 1) / share;
    for (int64_t i = 0; i < row; i++) to[i] = NAMED(cut)(words[i], by);
    for (int place = 1; place < share; place++) {
        const WORD *from = words + place * row;
        const int64_t left = count - place * row < row ? count - place * row : row;
        for (int64_t i = 0; i < left; i++) to[i] |= (uint8_t)(NAMED(cut)(from[i], by) << place * bits);
    }
}
