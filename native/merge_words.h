/* One frame of words of type WORD: merge.c includes this for each type, and NAMED gives the functions their names.
 *
 * Bits are moved by multiplication: shifts by a number that the compiler does not know have no 16-bit vectors. */

/* How a plane's bits become a part of the field. */
typedef struct {
    WORD right; /* 256 / 2^(bits below the element's) */
    WORD mask;  /* of the element's bits, once they are the lowest */
    WORD left;  /* 2^(the field's bits below the plane's) */
} NAMED(move_t);

TN_INLINE WORD NAMED(moved)(uint8_t byte, NAMED(move_t) move) {
    return (WORD)((WORD)((WORD)((WORD)(byte * move.right) >> 8) & move.mask) * move.left);
}

/* How a tier's field becomes bits of words. */
typedef struct {
    WORD exponent;  /* factor */
    WORD sign_mask; /* the field's highest bit, in the first tier */
    WORD sign;      /* factor */
    WORD mask;      /* the field's mantissa bits */
    WORD mantissa;  /* factor */
    WORD keep;      /* bits that a later tier leaves as they are */
    WORD fill;      /* the middle of what is unknown */
} NAMED(recipe_t);

TN_INLINE WORD NAMED(first_word)(WORD field, uint8_t exponent, NAMED(recipe_t) recipe) {
    return (WORD)((WORD)(exponent * recipe.exponent) | (WORD)((field & recipe.sign_mask) * recipe.sign) |
                  (WORD)((field & recipe.mask) * recipe.mantissa) | recipe.fill);
}

TN_INLINE WORD NAMED(later_word)(WORD field, WORD word, NAMED(recipe_t) recipe) {
    return (WORD)((word & recipe.keep) | (WORD)(field * recipe.mantissa) | recipe.fill);
}

static NAMED(recipe_t) NAMED(recipe_of)(const tn_merge_args *args) {
    const int unknown = args->mantissa_bits - args->known_bits;
    int field_bits = 0;
    for (int plane = 0; plane < args->num_planes; plane++) field_bits += args->plane_bits[plane];
    return (NAMED(recipe_t)){
        .exponent = (WORD)((WORD)1 << args->mantissa_bits),
        .sign_mask = (WORD)((WORD)1 << args->known_bits),
        .sign = (WORD)((WORD)1 << (8 * sizeof(WORD) - 1 - args->known_bits)),
        .mask = (WORD)(((WORD)1 << args->known_bits) - 1),
        .mantissa = (WORD)((WORD)1 << unknown),
        .keep = args->exponents == NULL ? (WORD)(~0u << (unknown + field_bits)) : 0,
        .fill = unknown ? (WORD)((WORD)1 << (unknown - 1)) : 0,
    };
}

/* Words whose field is one plane's bits: most of them. */
static void NAMED(merge_one)(WORD *restrict out, const uint8_t *restrict exponents, const uint8_t *restrict bytes,
                             int64_t count, NAMED(move_t) move, NAMED(recipe_t) recipe) {
    if (exponents != NULL)
        for (int64_t i = 0; i < count; i++)
            out[i] = NAMED(first_word)(NAMED(moved)(bytes[i], move), exponents[i], recipe);
    else
        for (int64_t i = 0; i < count; i++) out[i] = NAMED(later_word)(NAMED(moved)(bytes[i], move), out[i], recipe);
}

/* Words of several planes: their field is made first, at most PIECE of them. */
static void NAMED(merge_several)(WORD *restrict out, const uint8_t *restrict exponents, const place_t *place,
                                 const NAMED(move_t) *moves, int num_planes, int64_t count, NAMED(recipe_t) recipe) {
    WORD field[PIECE];
    for (int plane = 0; plane < num_planes; plane++) {
        const uint8_t *bytes = place[plane].bytes;
        const NAMED(move_t) move = moves[plane];
        if (plane == 0)
            for (int64_t i = 0; i < count; i++) field[i] = NAMED(moved)(bytes[i], move);
        else
            for (int64_t i = 0; i < count; i++) field[i] |= NAMED(moved)(bytes[i], move);
    }
    if (exponents != NULL)
        for (int64_t i = 0; i < count; i++) out[i] = NAMED(first_word)(field[i], exponents[i], recipe);
    else
        for (int64_t i = 0; i < count; i++) out[i] = NAMED(later_word)(field[i], out[i], recipe);
}

/* A frame of `count` elements, whose planes begin at `planes`. */
static void NAMED(merge_frame)(WORD *out, const uint8_t *exponents, const uint8_t *const *planes,
                               const tn_merge_args *args, int64_t count) {
    const NAMED(recipe_t) recipe = NAMED(recipe_of)(args);
    const bool is_one = args->num_planes == 1;
    for (int64_t at = 0, step; at < count; at += step) {
        place_t place[TN_MAX_PLANES];
        NAMED(move_t) moves[TN_MAX_PLANES];
        step = is_one || count - at < PIECE ? count - at : PIECE;
        WORD left = 1; /* of the lowest plane, which is the last */
        for (int plane = args->num_planes - 1; plane >= 0; plane--) {
            const int bits = args->plane_bits[plane];
            place[plane] = place_in(planes[plane], bits, count, at);
            if (place[plane].count < step) step = place[plane].count;
            moves[plane] = (NAMED(move_t)){(WORD)(256 >> place[plane].down), (WORD)((1 << bits) - 1), left};
            left = (WORD)(left << bits);
        }
        const uint8_t *powers = exponents == NULL ? NULL : exponents + at;
        if (is_one)
            NAMED(merge_one)(out + at, powers, place[0].bytes, step, moves[0], recipe);
        else
            NAMED(merge_several)(out + at, powers, place, moves, args->num_planes, step, recipe);
    }
}
